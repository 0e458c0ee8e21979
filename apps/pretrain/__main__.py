"""`uv run apps/pretrain`: hands over to the installed package."""

import sys

from pretrain.__main__ import main

sys.exit(main())
