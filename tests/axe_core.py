"""axe, the accessibility checker, from npm (MPL-2.0, 650 KB): not part of this repository."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from typing import Any

import pytest

AXE = "axe-core@4.14.0"


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("npm") is None:
        pytest.skip("no npm")
    folder = tmp_path_factory.mktemp("axe")
    done = subprocess.run(
        ["npm", "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True, check=True
    )
    with tarfile.open(folder / done.stdout.strip()) as pack:
        member = pack.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


def violations(page: Any, axe: str) -> list[str]:
    page.evaluate(axe)
    found = page.evaluate("async () => (await axe.run(document)).violations")
    return [f"{v['id']}: {[n['html'][:100] for n in v['nodes']][:3]}" for v in found]
