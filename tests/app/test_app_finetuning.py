"""The network learns on with the edited tree, while the server answers."""

import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from app_server import serving  # noqa: E402
from prototree.editing.session import open_session  # noqa: E402
from prototree.pipeline.fit import fit  # noqa: E402
from prototree.pipeline.stages import Run  # noqa: E402
from tiny_editing import content_of, tiny_run  # noqa: E402
from tiny_training import TINY_DISTILL, write_squares  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("learning")
    short = TINY_DISTILL | {"pretrain_epochs": 1, "head_epochs": 2}  # the tree's epochs are what learning on takes
    return fit(write_squares(folder / "squares", train=6, test=4), folder / "run", settings=short)


def test_learning_makes_a_new_run_and_is_judged_on_photos_kept_back(run: Run, tmp_path: Path) -> None:
    before = content_of(run.folder)
    with (
        serving(run.folder, "--work", str(tmp_path / "work"), cache=tmp_path) as server,
        httpx.Client(base_url=server.address, timeout=3600) as client,
    ):
        assert client.get("/api/finetune").json()["state"] == "idle"
        chosen = client.get("/api/nodes/0/candidates").json()["candidates"][-1]
        edit = {"edit": "replace", "node": 0, "photo": chosen["photo"]["index"], "patch": chosen["patch"]}
        now = client.post("/api/edits", json={"revision": 0, "edit": edit | {"view": chosen["view"]}})
        assert now.status_code == 200, now.text
        assert client.post("/api/finetune", json={"revision": 0}).status_code == 409, "an old revision"
        job = client.post("/api/finetune", json={"revision": 1}).json()
        assert job["state"] == "learning"
        again = client.post("/api/finetune", json={"revision": 1})
        assert again.status_code == 409
        assert "learning already" in again.json()["detail"]
        assert client.get("/api/health").json()["status"] == "ok"
        deadline = time.monotonic() + 3600
        while (job := client.get("/api/finetune").json())["state"] == "learning":
            assert time.monotonic() < deadline, job
            time.sleep(0.2)
        assert job["state"] == "done", job
        assert Path(job["folder"]).samefile(run.folder.parent / job["run"]), (
            "the command that opens it is right from here"
        )
    assert content_of(run.folder) == before
    learned = Run(run.folder.parent / job["run"])
    source = learned.tree().sources[0]
    assert source is not None
    assert (source.image, source.view, list(source.patch)) == (
        chosen["photo"]["name"],
        chosen["view"],
        chosen["patch"],
    )
    session = open_session(learned)  # keeps back the same half of the test photos
    assert session.held_back is not None
    decided = learned.tree().eval()
    right = [decided.decide(decided.route(z)).labels("greedy") == y for z, y, _ in session.held_back.batches()]
    assert job["learned"] == pytest.approx(sum(int(r.sum()) for r in right) / len(session.held_back))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for the process in /proc")
def test_a_server_that_stops_ends_what_it_started(run: Run, tmp_path: Path) -> None:
    with (
        serving(run.folder, "--work", str(tmp_path / "work"), cache=tmp_path) as server,
        httpx.Client(base_url=server.address, timeout=3600) as client,
    ):
        note = {"edit": "note", "node": 0, "text": "square"}
        assert client.post("/api/edits", json={"revision": 0, "edit": note}).status_code == 200
        assert client.post("/api/finetune", json={"revision": 1}).json()["state"] == "learning"
        (learning,) = [path for path in Path("/proc").glob("[0-9]*") if is_learning(path, run)]
    assert not is_learning(learning, run), "it goes on without its server"


def is_learning(process: Path, run: Run) -> bool:
    try:
        command = (process / "cmdline").read_bytes()
    except OSError:
        return False
    return b"\0finetune\0" in command and bytes(run.folder) in command


def test_a_tree_whose_prototypes_move_while_learning_is_not_offered_it(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    with serving(run.folder, cache=tmp_path) as server, httpx.Client(base_url=server.address, timeout=3600) as client:
        assert client.get("/api/run").json()["can_finetune"] is False
        assert 'id="learn"' not in client.get("/edit").text
        refused = client.post("/api/finetune", json={"revision": 0})
        assert refused.status_code == 422
        assert "keeps prototypes in place" in refused.json()["detail"]
        assert not list(tmp_path.glob("run-edited*")), "nothing is saved for a refusal"
