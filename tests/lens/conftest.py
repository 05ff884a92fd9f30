"""The folder of the live server, for the imports of the Lens tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "server"))
