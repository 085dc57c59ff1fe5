"""`python -m partita`, as torchrun starts it."""

import sys

from partita.cli.main import main

sys.exit(main())
