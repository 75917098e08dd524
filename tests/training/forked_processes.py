"""Runs a script of the tests as one process, as two, and so on, all of them copies of one that has imported everything.

To the script it is as under torchrun: the same variables in its environment, and a store that belongs to the launcher.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path

from torch.distributed import TCPStore

import prototree.pipeline.fit  # noqa: F401  (once, for all copies)


def main(script: str, photos: str, out: Path, counts: list[int], *words: str) -> None:
    for count in counts:
        (out / str(count)).mkdir()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        argv = [script, photos, str(out / str(count)), *words]
        children = [_start(argv, rank, count, store.port) for rank in range(count)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"{count} processes ended with {codes}")


def _start(argv: list[str], rank: int, count: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    sys.argv = argv
    code = 1
    try:
        runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), [int(count) for count in sys.argv[4].split(",")], *sys.argv[5:])
