#!/bin/sh
# Makes a virtual environment with the peers, which sees the packages of the repository's own .venv behind its own.
# usage: bench/linear-fastest/peers.sh FOLDER
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
"$here/.venv/bin/python" -m venv "$1"
site=$("$1/bin/python" -c 'import site; print(site.getsitepackages()[0])')
ours=$("$here/.venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
echo "$ours" > "$site/behind.pth"
for peer in snapml==1.17.2 skglm==0.5 celer==0.7.4 liblinear-official==2.50.0 xgboost==3.2.0 glum==3.4.1 vowpalwabbit==9.11.9; do
  "$1/bin/pip" install --quiet "$peer" || echo "not installed: $peer (its rows will say so)"
done
