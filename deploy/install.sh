#!/bin/sh
# Installs the command `verbatim` into an environment of its own, with uv or pipx, whichever is here:
#   sh deploy/install.sh            from this checkout
#   sh deploy/install.sh ADDRESS    from a wheel: file:///... or https://...
# It never asks an index for the name: an index may hold another project under it.
set -eu
source=${1:-file://$(cd "$(dirname "$0")/.." && pwd)}
wanted="verbatim-engine[server,grammar] @ $source"
command -v uv >/dev/null && exec uv tool install "$wanted"
command -v pipx >/dev/null && exec pipx install --pip-args=--no-compile "$wanted"
echo "install uv (https://docs.astral.sh/uv) or pipx first" >&2
exit 1
