"""`uv run apps/pretrain`: hands over to the installed package."""

import sys

from pretrain import main

sys.exit(main())
