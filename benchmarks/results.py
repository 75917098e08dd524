"""Measure what README and documentation report, and write their tables from it.

    python benchmarks/results.py run --out FOLDER --cub CUB_200_2011 --birds-weights FILE [EXPERIMENT...]
    python benchmarks/results.py collect --out FOLDER
    python benchmarks/results.py write

`run` makes the experiments that are missing, or those that are named; an interrupted one continues. Each leaves
FOLDER/NAME.json with its commands, commit, date, machine and metrics. `collect` puts those with the same `src` into
docs/research/results.json; what was not run is null there. `write` fills the tables between `<!-- results: NAME -->`
and `<!-- end of results -->` in README and docs. `make results` does all three.
"""

import argparse
import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from prototree.io import read_json, write_file, write_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "research" / "results.json"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
NOT_RUN = "not run"
_BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end of results -->)", re.S)

Metrics = Mapping[str, Any]


# Experiments


@dataclass(frozen=True)
class Experiment:
    """Commands that make one set of figures, and how to read them. Words in braces are what the user names."""

    name: str
    commands: tuple[str, ...]
    read: Callable[[Path], dict[str, Any]]
    minutes: int  # about, on two CPU cores


def read_seeds(folder: Path) -> dict[str, Any]:
    """Read the runs of several seeds, and their ensembles."""
    runs = [read_run(path) for path in sorted(folder.glob("run/seed-*")) if path.is_dir()]
    ensembles = [
        {"n_trees": found["n_trees"], "n_prototypes": found["n_prototypes"], **_accuracy(found["accuracy"])}
        for found in read_json(folder / "run" / "ensemble.json")["ensembles"]
    ]
    return {"runs": runs, "ensembles": ensembles}


def read_one(folder: Path) -> dict[str, Any]:
    """Read a single run."""
    return {"runs": [read_run(folder / "run")], "ensembles": []}


def read_run(folder: Path) -> dict[str, Any]:
    """Read what the tables need of one run."""
    found = read_json(folder / "metrics.json")
    end = found["stages"]["projected"]
    keys = ("n_images", "n_prototypes", "top5", "confidence_ece", "coverage", "selective_accuracy")
    return {
        **_accuracy(end["accuracy"]),
        **{key: end[key] for key in keys},
        "fidelity": end["fidelity"]["greedy"],
        "path_length": end["path_length"]["greedy"],
        "baseline": found["baseline_accuracy"],
        "seconds": found["seconds"],
        **({"ood": found["ood"]} if "ood" in found else {}),
        **({"quality": _quality(found["prototype_quality"])} if "prototype_quality" in found else {}),
    }


def _accuracy(found: Metrics) -> dict[str, float]:
    return {strategy: found[strategy] for strategy in ("soft", "max_path", "greedy")}


def _quality(found: Metrics) -> dict[str, Any]:
    means = {method: {split: own["mean"] for split, own in of.items()} for method, of in found["purity"].items()}
    keys = ("consistency", "stability", "occlusion", "on_discriminative_part")
    return {"purity": means, "baselines": found["baselines"], **{key: found[key] for key in keys}}


def read_cuts(folder: Path) -> dict[str, Any]:
    """Read the runs of benchmarks/cuts.py."""
    runs = sorted(path.parent for path in (folder / "run").glob("*/metrics.json"))
    return {"cuts": {path.name.rpartition("-")[0]: read_run(path) for path in runs}}


def read_latency(folder: Path) -> dict[str, Any]:
    """Read the seconds of benchmarks/latency.py, by network."""
    return {"seconds": {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}}


def read_paper(folder: Path) -> dict[str, Any]:
    """Read what `prototree reproduce` has written."""
    found = read_json(folder / "run" / "paper.json")
    return {key: found[key] for key in ("height", "runs", "claims", "published_scale")}


_TRAIN = "prototree train {data} --out {out}/run"
_SEEDS = "--seeds {n_seeds} --jobs 1 --threads 1"  # one core, so that two experiments run side by side
_BIRDS = "--backbone birds --weights {birds}"
# Two epochs with everything learning, at the rate of the paper's network, which comes from iNaturalist, too: 1e-5, to
# which milestones halve the backbone's rate while it is frozen. Frozen epochs cost seconds: features are cached.
_PAPER = "--lr-backbone 1.6e-4 --epochs 82 --freeze-epochs 80 --milestones 50,60,70,80"
_LATENCY = "python {root}/benchmarks/latency.py {out}/../{name}/run/seed-0 {cub50}/images {out}/{name}.json"
_CUTS = "python {root}/benchmarks/cuts.py {cub50} --out {out}/run --cuts 50x5,50x10,50x20,50x30"


def experiments() -> tuple[Experiment, ...]:
    """List the experiments, the cheap ones first."""

    def train(data: str, options: str, n_seeds: int = 0) -> str:
        seeds = f" {_SEEDS}".replace("{n_seeds}", str(n_seeds)) if n_seeds else ""
        return f"{_TRAIN} {options}{seeds}".replace("{data}", data)

    def latency(name: str) -> str:
        return _LATENCY.replace("{name}", name)

    quality = tuple(f"prototree evaluate {{out}}/run/seed-0 {of}" for of in ("--prototypes", "--ood {others}"))
    many = f"{_BIRDS} --views 3 --occlusion-weight 0"
    runs = ("--heights 7", "--heights 5,6,7 --seeds 1")
    reproduce = f"prototree reproduce cub --data {{cub50}} {_BIRDS} {_PAPER}"
    paper = tuple(f"{reproduce} {of} --out {{out}}/run" for of in runs)
    runs = ("--heights 5", "--heights 3,4,5,6 --seeds 1")
    birds = tuple(f"prototree reproduce birds {of} --out {{out}}/run" for of in runs)
    return (
        Experiment("demo", (train("birds", "--preset demo"),), read_one, 2),
        Experiment("cub50", (train("{cub50}", "", 3), *quality), read_seeds, 45),
        Experiment("cub50-birds", (train("{cub50}", _BIRDS, 3), *quality), read_seeds, 40),
        Experiment("latency", tuple(map(latency, ("cub50", "cub50-birds"))), read_latency, 2),
        Experiment("images-per-class", (f"{_CUTS} --set backbone=birds --set weights={{birds}}",), read_cuts, 30),
        Experiment("cub200-birds", (train("{cub}", many, 5), quality[0]), read_seeds, 70),
        Experiment("cub200", (train("{cub}", ""),), read_one, 80),
        Experiment("paper-birds", birds, read_paper, 60),
        Experiment("paper-cub50", paper, read_paper, 100),
    )


def run_experiment(experiment: Experiment, out: Path, names: Mapping[str, str]) -> None:
    """Run the commands of an experiment; training continues where it was interrupted."""
    folder = out / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    began, commands, made_by = time.monotonic(), [], commit()
    for template in experiment.commands:
        words = [word.format(**names, out=folder) for word in shlex.split(template)]
        if words[1] == "train" and Path(words[words.index("--out") + 1]).exists():
            words.append("--resume")
        print(f"{experiment.name}: {shlex.join(words)}", flush=True)
        program = [sys.executable, *(["-m"] if words[0] == "prototree" else []), *words[words[0] == "python" :]]
        subprocess.run(program, check=True)
        commands.append(re.sub(r"\{(\w+)\}", lambda word: word[1].upper(), template))
    content = {
        "commands": commands,
        "commit": made_by,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "seconds": round(time.monotonic() - began),
        "metrics": experiment.read(folder),
    }
    write_json(out / f"{experiment.name}.json", content)


def commit() -> str:
    """Name the commit of the code; it must be committed."""
    changed = _git("status", "--porcelain", "--", "src", "benchmarks")
    if changed:
        raise SystemExit(f"commit src and benchmarks first, so that figures have a commit:\n{changed}")
    return _git("rev-parse", "--short=10", "HEAD")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def machine() -> dict[str, Any]:
    """Describe the machine."""
    import torch

    return {"cores": os.cpu_count(), "processor": platform.machine(), "torch": torch.__version__.partition("+")[0]}


# Tables


def collect(out: Path) -> dict[str, Any]:
    """Put the experiments of one state of `src` together; those of others count as not run."""
    found = {e.name: read_json(out / f"{e.name}.json") for e in experiments() if (out / f"{e.name}.json").exists()}
    code = {name: _git("log", "-1", "--format=%ct %h", entry["commit"], "--", "src") for name, entry in found.items()}
    newest = max(code.values(), default="")  # by the time of the last commit that changed `src`
    if other := sorted(name for name in found if code[name] != newest):
        print(f"left out, because src has changed since: {', '.join(other)}")
    same = {name: entry for name, entry in found.items() if code[name] == newest}
    return {"commit": newest.partition(" ")[2], "experiments": {e.name: same.get(e.name) for e in experiments()}}


@dataclass(frozen=True)
class Results:
    """The measured experiments; what was not run is None."""

    content: Metrics

    def metrics(self, name: str) -> Metrics | None:
        entry = self.content["experiments"].get(name)
        return None if entry is None else entry["metrics"]

    def mean(self, name: str, key: str, *, scale: float = 100, digits: int = 1) -> str:
        """Write the mean and sample standard deviation of a metric over the runs of an experiment."""
        metrics = self.metrics(name)
        values = [scale * run[key] for run in metrics["runs"] if run[key] is not None] if metrics else []
        if not values:
            return NOT_RUN
        spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{fmean(values):.{digits}f}{spread}"

    def runs(self, name: str) -> int:
        metrics = self.metrics(name)
        return len(metrics["runs"]) if metrics else 0


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def headline(results: Results) -> str:
    """The published result, ours, and the same networks without a tree."""
    rows: list[tuple[str, ...]] = [
        ("published", "200", "ResNet50, iNaturalist, fine-tuned", "82.2 ± 0.7", "82.1", "–", "202")
    ]
    for name, n_classes, network in (
        ("cub200-birds", 200, "MobileNetV2, iNaturalist's birds, frozen"),
        ("cub200", 200, "EfficientNet-Lite0, ImageNet, frozen"),
        ("cub50-birds", 50, "the birds' network"),
        ("cub50", 50, "EfficientNet-Lite0"),
    ):
        n_runs = results.runs(name)
        seeds = {0: NOT_RUN, 1: "one tree"}.get(n_runs, f"{n_runs} seeds")
        seeds += ", no occlusion loss" if name == "cub200-birds" else ""
        cells = (results.mean(name, key) if n_runs else "–" for key in ("soft", "greedy", "baseline"))
        n_prototypes = results.mean(name, "n_prototypes", scale=1, digits=0).split()[0] if n_runs else "–"
        rows.append((f"prototree, {seeds}", str(n_classes), network, *cells, n_prototypes))
    header = ("CUB-200-2011, % correct", "classes", "network", "soft", "single path", "no tree", "prototypes")
    return markdown(header, rows)


def seeds_table(name: str) -> Callable[[Results], str]:
    """Make the table of the seeds of an experiment and of their ensembles."""

    def table(results: Results) -> str:
        metrics = results.metrics(name)
        if metrics is None:
            return f"*{NOT_RUN}*\n"
        rows = [_run_row(f"seed {number}", run) for number, run in enumerate(metrics["runs"])]
        if len(rows) > 1:
            rows.append(_mean_row(results, name))
        header = ("", "baseline", "soft", "single path", "fidelity", "calibration error", "path length", "answered")
        text = markdown(header, rows)
        if metrics["ensembles"]:
            groups = [
                (str(g["n_trees"]), f"{100 * g['soft']:.1f}", f"{100 * g['greedy']:.1f}", str(g["n_prototypes"]))
                for g in metrics["ensembles"]
            ]
            text += "\n" + markdown(("trees of the ensemble", "soft", "single paths", "prototypes"), groups)
        return text

    return table


def _run_row(name: str, run: Metrics) -> tuple[str, ...]:
    length = run["path_length"]
    return (
        name,
        *(f"{100 * run[key]:.1f}" for key in ("baseline", "soft", "greedy", "fidelity")),
        f"{run['confidence_ece']:.3f}",
        f"{length['mean']:.1f} ({length['min']}–{length['max']})",
        f"{100 * run['coverage']:.1f}",
    )


def _mean_row(results: Results, name: str) -> tuple[str, ...]:
    metrics = results.metrics(name)
    assert metrics is not None
    length = fmean(run["path_length"]["mean"] for run in metrics["runs"])
    return (
        "mean ± std",
        *(results.mean(name, key) for key in ("baseline", "soft", "greedy", "fidelity")),
        f"{fmean(run['confidence_ece'] for run in metrics['runs']):.3f}",
        f"{length:.1f}",
        results.mean(name, "coverage"),
    )


def tree_cost(results: Results) -> str:
    """What reading a classifier as a tree costs, in points."""
    rows: list[tuple[str, ...]] = []
    for name, data in (("cub50-birds", "50 classes, birds"), ("cub50", "50 classes, lite0"),
                       ("cub200-birds", "200 classes, birds"), ("cub200", "200 classes, lite0")):  # fmt: skip
        metrics = results.metrics(name)
        if metrics is None:
            rows.append((data, NOT_RUN, "–", "–"))
            continue
        mean = {key: 100 * fmean(run[key] for run in metrics["runs"]) for key in ("baseline", "soft", "greedy")}
        rows.append(
            (data, f"{mean['baseline']:.1f}", *(f"{mean['baseline'] - mean[k]:.1f}" for k in ("soft", "greedy")))
        )
    return markdown(("data, network", "baseline", "cost of the tree, soft", "cost of a single path"), rows)


def images_per_class(results: Results) -> str:
    """What more images of each class buy."""
    metrics = results.metrics("images-per-class")
    if metrics is None:
        return f"*{NOT_RUN}*\n"
    cuts = sorted(metrics["cuts"].items(), key=lambda item: [int(part) for part in item[0].split("x")])
    rows = [(name.split("x")[1], *(f"{100 * run[key]:.1f}" for key in ("baseline", "soft", "greedy", "coverage")),
             f"{run['confidence_ece']:.3f}") for name, run in cuts]  # fmt: skip
    header = ("training images of each class", "baseline", "soft", "single path", "answered", "calibration error")
    return markdown(header, rows)


def latency(results: Results) -> str:
    """Milliseconds of a prediction with one thread."""
    metrics = results.metrics("latency")
    if metrics is None:
        return f"*{NOT_RUN}*\n"
    rows = []
    for name, network in (("cub50", "EfficientNet-Lite0"), ("cub50-birds", "MobileNetV2 (`birds`)")):
        found = metrics["seconds"][name]
        times = (f"{1000 * found[key]:.0f}" for key in ("predict", "predict_many", "explain"))
        rows.append((f"{network}, {found['image_size']} px, {found['crops']} crops", *times))
    header = ("network, 50 classes", "one image, ms", "each of many, ms", "one explained decision, ms")
    return markdown(header, rows)


def unknown_classes(results: Results) -> str:
    """Whether images of other bird species are noticed."""
    rows = []
    for name, network in (("cub50-birds", "birds"), ("cub50", "lite0")):
        metrics = results.metrics(name)
        for ood in (metrics["runs"][0].get("ood") or {}).values() if metrics else ():
            scores = ", ".join(f"{score} {value:.3f}" for score, value in sorted(ood["auroc"].items()))
            rows.append((network, str(ood["n_images"]), scores, _share(ood["fpr_at_95_tpr"]), _share(ood["coverage"])))
    header = ("network", "images of the other 150 species", "AUROC", "accepted when 95 % of own images are", "answered")
    return markdown(header, rows) if rows else f"*{NOT_RUN}*\n"


def faithfulness(results: Results) -> str:
    """Part purity and the occlusion test of trees of CUB."""
    rows = []
    for name, network in (
        ("cub50", "50 classes, EfficientNet-Lite0"),
        ("cub50-birds", "50 classes, `birds`"),
        ("cub200-birds", "200 classes, `birds`, no occlusion loss"),
    ):
        metrics = results.metrics(name)
        found = metrics["runs"][0].get("quality") if metrics else None
        if found is None:
            rows.append((network, *[NOT_RUN] * 8))
            continue
        purity, test = found["purity"]["peak"], found["occlusion"]["peak"]
        rates = ("loss_rate", "random_loss_rate", "flip_rate", "random_flip_rate")
        controls = (found["baselines"]["test"][name] for name in ("object_middle", "random_patch"))
        cells = (*(f"{purity[split]:.2f}" for split in ("train", "test")), *(f"{value:.2f}" for value in controls))
        rows.append((network, *cells, *(_share(test[rate]) for rate in rates)))
    header = (
        *("tree, seed 0", "part purity, train", "test", "object's middle", "random patch"),
        *("loss rate", "random boxes", "flip rate", "random boxes"),
    )
    return markdown(header, rows)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def claims(name: str) -> Callable[[Results], str]:
    """Make the table of the paper's six claims."""

    def table(results: Results) -> str:
        metrics = results.metrics(name)
        if metrics is None:
            return f"*{NOT_RUN}*\n"
        rows = []
        for claim in metrics["claims"]:
            published = "; ".join(f"{figure['name']}: {figure['published']}" for figure in claim["figures"])
            cells = []
            for figure in claim["figures"]:
                value = NOT_RUN if figure["measured"] is None else f"{figure['measured']:.{figure['digits']}f}"
                cells.append(f"{figure['name']}: {value}" + (f" ({figure['note']})" if figure["note"] else ""))
            rows.append((claim["claim"], published, "; ".join(cells), claim["verdict"]))
        return markdown(("claim", "published", "measured", "verdict"), rows)

    return table


def demo(results: Results) -> str:
    """The tree of `make demo`."""
    metrics = results.metrics("demo")
    return f"*{NOT_RUN}*\n" if metrics is None else markdown(
        ("", "baseline", "soft", "single path", "fidelity", "calibration error", "path length", "answered"),
        [_run_row("12 generated birds", metrics["runs"][0])],
    )  # fmt: skip


def provenance(results: Results) -> str:
    """Commit, machine, commands and dates of every experiment."""
    rows = []
    for name, entry in results.content["experiments"].items():
        if entry is None:
            rows.append((name, NOT_RUN, "–", "–", "–"))
            continue
        commands = "<br>".join(f"`{command}`" for command in entry["commands"])
        rows.append((name, commands, entry["commit"][:7], entry["date"], f"{entry['seconds'] / 60:.0f}"))
    text = markdown(("experiment", "commands", "scripts of commit", "date", "minutes"), rows)
    made = next((entry["machine"] for entry in results.content["experiments"].values() if entry), None)
    where = f", {made['cores']} cores ({made['processor']}), torch {made['torch']}" if made else ""
    return f"`src` of commit `{results.content['commit']}`{where}.\n\n{text}"


TABLES: dict[str, Callable[[Results], str]] = {
    "headline": headline,
    "tree-cost": tree_cost,
    "demo": demo,
    **{name: seeds_table(name) for name in ("cub50", "cub50-birds", "cub200", "cub200-birds")},
    "images-per-class": images_per_class,
    "latency": latency,
    "unknown-classes": unknown_classes,
    "faithfulness": faithfulness,
    "paper-cub50": claims("paper-cub50"),
    "paper-birds": claims("paper-birds"),
    "provenance": provenance,
}


def filled(text: str, results: Results) -> str:
    """Return a page with its tables as the results have them."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{TABLES[block[2]](results)}\n{block[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "collect", "write"))
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "results")
    parser.add_argument("--cub", type=Path, help="CUB-200-2011 as published")
    parser.add_argument("--birds-weights", type=Path, help="weights of the birds' network")
    chosen = parser.parse_intermixed_args()
    if chosen.action == "run":
        run(chosen.out.resolve(), chosen.names, chosen.cub, chosen.birds_weights)
    elif chosen.action == "collect":
        write_json(RESULTS, collect(chosen.out))
    else:
        results = Results(read_json(RESULTS))
        for page in PAGES:
            text = page.read_text()
            if (new := filled(text, results)) != text:
                write_file(page, new.encode())
                print(f"written: {page.relative_to(ROOT)}")


def run(out: Path, names: Sequence[str], cub: Path | None, weights: Path | None) -> None:
    """Run the experiments that are missing, or those named."""
    known = {experiment.name: experiment for experiment in experiments()}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no experiment {unknown[0]!r}; expected some of {', '.join(known)}")
    words = {"root": str(ROOT), "birds": str(weights.resolve() if weights else "")}
    if cub is not None:
        words |= {"cub": str(cub.resolve()), **_parts_of(cub, out)}
    for name in names or known:
        needed = {word for command in known[name].commands for word in re.findall(r"\{(\w+)\}", command)} - {"out"}
        if (out / f"{name}.json").exists() and not names:
            print(f"{name} is there already")
        elif missing := sorted(word for word in needed if not words.get(word)):
            print(f"{name} is left out: it needs {' and '.join(missing)}; see --help")
        else:
            run_experiment(known[name], out, words)


def _parts_of(cub: Path, out: Path) -> dict[str, str]:
    """Write the 50 classes of the results as a data set, and the other 150 as another."""
    from prototree.data.cub_cars import cub_50, write_cub_subset

    own = {name.partition(".")[2] for name in cub_50()} | set(cub_50())
    every = [line.split()[1] for line in (cub / "classes.txt").read_text().splitlines()]
    others = [name for name in every if name not in own and name.partition(".")[2] not in own]
    folders = {"cub50": (out / "data" / "CUB_50", cub_50()), "others": (out / "data" / "CUB_150", others)}
    for folder, classes in folders.values():
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            write_cub_subset(cub, folder, classes)
    return {name: str(folder) for name, (folder, _) in folders.items()}


if __name__ == "__main__":
    main()
