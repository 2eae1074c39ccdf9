"""Entry point of `python -m trl_opsd.teacher.serve MODEL`."""

import sys

from trl_opsd.teacher.serve.start import main

if __name__ == "__main__":
    sys.exit(main())
