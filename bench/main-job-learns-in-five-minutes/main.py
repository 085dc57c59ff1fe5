"""The main job: 200 steps of a byte-level GPT, by the command a newcomer types."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import row, write

STEPS, LAST = 200, 20
LOSS, GAP, SECONDS = 2.6, 0.15, 300.0  # nats per byte; held-out minus trained; wall seconds
UNIFORM = 5.55  # ln 256


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "partita", "train", "--steps", str(STEPS), "-o", f"{folder}/run", "--json"]
        began = time.perf_counter()
        got = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        seconds = time.perf_counter() - began
        plan = (Path(folder) / "run" / "plan.toml").read_text()
    last = sum(got["losses"][-LAST:]) / LAST
    gap = got["held_out_loss"] - last
    rows = [
        row(f"mean loss of the last {LAST} of {STEPS} steps (nats per byte)", f"<= {LOSS}", round(last, 3), held=last <= LOSS),
        row("held-out loss minus that", f"<= {GAP}", round(gap, 3), held=gap <= GAP),
        row(
            "the whole command, first probe included if there is none (s)",
            f"<= {SECONDS:g}",
            round(seconds, 1),
            held=seconds <= SECONDS,
        ),
    ]
    predicted, error = got["predicted"], got["error"]
    bytes_of = lambda traffic: sum(t["bytes"] for t in traffic)
    figures = [
        {
            "what": "step time (ms, p10)",
            "predicted": round(1e3 * predicted["step_seconds"], 1),
            "measured": round(1e3 * got["step_seconds_p10"], 1),
            "error": f"{100 * error['time']:+.1f} %",
        },
        {
            "what": "peak memory (MiB)",
            "predicted": round(predicted["memory_bytes"]["peak"] / 2**20, 1),
            "measured": round(got["memory_bytes"]["peak"] / 2**20, 1),
            "error": f"{100 * error['memory']:+.1f} %",
        },
        {
            "what": "traffic (bytes a step and rank)",
            "predicted": bytes_of(predicted["traffic"]),
            "measured": bytes_of(got["traffic"]),
            "error": "0" if error["traffic"] == 0 else f"{100 * error['traffic']:+.1f} %",
        },
    ]
    return write(__file__, [*rows, *figures], plan=plan, sample=got["sample"])


if __name__ == "__main__":
    sys.exit(main())
