"""`python -m controller`: see `controller.cli`."""

from controller.cli import main

raise SystemExit(main())
