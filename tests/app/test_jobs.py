"""Fine-tuning in the background, while the server answers."""

import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from app_server import edit, serving  # noqa: E402
from prototree.editing.session import edit as open_session  # noqa: E402
from prototree.pipeline.fit import fit  # noqa: E402
from prototree.run import Run  # noqa: E402
from tiny_editing import content_of, tiny_run  # noqa: E402
from tiny_training import TINY_DISTILL, write_squares  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("finetune")
    short = TINY_DISTILL | {"pretrain_epochs": 1, "head_epochs": 2}  # the tree's epochs are what fine-tuning takes
    return fit(write_squares(folder / "squares", train=6, test=4), folder / "run", settings=short)


def test_finetuning_makes_a_new_run_and_is_evaluated_on_held_out_images(run: Run, tmp_path: Path) -> None:
    before = content_of(run.folder)
    with (
        serving(run.folder, "--edits-dir", str(tmp_path / "work"), cache=tmp_path) as server,
        httpx.Client(base_url=server.address, timeout=3600) as client,
    ):
        assert client.get("/api/finetune").json()["state"] == "idle"
        chosen = client.get("/api/nodes/1/candidates").json()[-1]
        patch = {"image": chosen["image"]["index"], "view": chosen["view"], "patch": chosen["patch"]}
        assert edit(client, edit="replace", node=1, **patch).status_code == 200
        assert client.post("/api/finetune", json={"revision": 0}).status_code == 409, "an old revision"
        assert client.post("/api/finetune", json={"revision": 1}).json()["state"] == "running"
        assert client.post("/api/finetune", json={"revision": 1}).status_code == 409, "it is running already"
        assert client.get("/api/health").json()["status"] == "ok"
        deadline = time.monotonic() + 3600
        while (job := client.get("/api/finetune").json())["state"] == "running":
            assert time.monotonic() < deadline, job
            time.sleep(0.2)
        assert job["state"] == "done", job
        assert Path(job["folder"]).samefile(run.folder.parent / job["run"]), "a path from where the server was started"
    assert content_of(run.folder) == before
    finetuned = Run(run.folder.parent / job["run"])
    source = finetuned.tree().sources[0]
    assert source is not None
    assert (source.image, source.crop, list(source.patch)) == (chosen["image"]["name"], chosen["view"], patch["patch"])
    session = open_session(finetuned)  # holds out the same half of the test images
    assert session.test is not None
    tree = finetuned.tree().eval()
    n_correct = sum(
        int((tree.decode(tree.forward_features(z)).labels("greedy") == labels).sum())
        for z, labels, _ in session.test.batches()
    )
    assert job["finetuned"] == pytest.approx(n_correct / len(session.test))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for the process in /proc")
def test_a_server_that_stops_ends_what_it_started(run: Run, tmp_path: Path) -> None:
    with (
        serving(run.folder, "--edits-dir", str(tmp_path / "work"), cache=tmp_path) as server,
        httpx.Client(base_url=server.address, timeout=3600) as client,
    ):
        assert edit(client, edit="note", node=1, text="square").status_code == 200
        assert client.post("/api/finetune", json={"revision": 1}).json()["state"] == "running"
        (process,) = [path for path in Path("/proc").glob("[0-9]*") if is_finetuning(path, run)]
    assert not is_finetuning(process, run), "it goes on without its server"


def is_finetuning(process: Path, run: Run) -> bool:
    try:
        command = (process / "cmdline").read_bytes()
    except OSError:
        return False
    return b"\0finetune\0" in command and bytes(run.folder) in command


def test_a_tree_whose_prototypes_would_move_is_not_finetuned(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    with serving(run.folder, cache=tmp_path) as server, httpx.Client(base_url=server.address, timeout=3600) as client:
        assert client.get("/api/run").json()["can_finetune"] is False
        assert 'id="finetune"' not in client.get("/edit").text
        assert client.post("/api/finetune", json={"revision": 0}).status_code == 422
        assert not list(tmp_path.glob("run-edited*")), "nothing is saved for a refusal"
