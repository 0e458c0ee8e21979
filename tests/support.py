"""Where things are."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, str(ROOT / "apps" / "pretrain")]
