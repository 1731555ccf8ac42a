"""The command `flatweights`, as ``python -m flatweights``."""

import sys

from flatweights_command import main

if __name__ == "__main__":
    sys.exit(main())
