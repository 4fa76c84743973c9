"""`python -m lorashard` is the command line, so that torchrun and accelerate can start it as a module."""

import sys

from .cli import main

sys.exit(main())
