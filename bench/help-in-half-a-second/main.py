"""`partita --help` answers at once and does not load torch."""

import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import row, write

REPEATS, BOUND = 10, 0.5
SEEN = "import sys; from partita.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"


def main() -> int:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "partita", "--help"], capture_output=True, check=True)
        times.append(time.perf_counter() - began)
    loaded = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, check=False).returncode
    rows = [
        row(f"--help, the whole command (s, best of {REPEATS})", f"< {BOUND}", round(min(times), 3), held=min(times) < BOUND),
        row("torch in sys.modules after it", "no", "yes" if loaded else "no", held=not loaded),
    ]
    return write(__file__, rows)


if __name__ == "__main__":
    sys.exit(main())
