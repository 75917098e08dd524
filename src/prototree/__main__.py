"""`python -m prototree` is the command `prototree`; also what `torchrun -m prototree` needs."""

from prototree.cli import main

main()
