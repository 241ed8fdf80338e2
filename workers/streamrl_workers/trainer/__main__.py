"""`python -m streamrl_workers.trainer`."""

import sys

from streamrl.errors import EXIT_DONE
from streamrl_workers.hearing import hear

hear(exit_code=EXIT_DONE)

from streamrl_workers.trainer.main import main  # noqa: E402 - these imports take seconds

sys.exit(main())
