"""`python -m streamrl_operator`: the operator."""

import sys

from streamrl_operator.main import main

if __name__ == "__main__":
    sys.exit(main())
