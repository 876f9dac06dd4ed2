"""`python -m workers.generation`: one generation worker process, started by `workers.launch`."""

from workers.generation.service import main

main()
