"""Kills a random rank at random moments, checkpoint writes included, and goes on each time from what is there.

    main.py [--kills 50] [--seed 0] [--out FILE]      without --out it writes results/result.json

One run: every life ends by SIGKILL to one rank, every next life is `--resume`. Half of the moments are drawn over the whole
life, set-up included; half while a checkpoint is being written. At the end the curve and the parameters must be those of a run
that nobody disturbed, bit for bit.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import row, write

from partita.runtime.checkpoint import check, steps

PLAN = """
partita = 1
[workload]
model = "gpt-tiny"
batch = 8
[mesh]
dp = 2
[[strategy]]
name = "ddp"
"""
EVERY = 3  # steps between checkpoints
LIFE = 4.0  # seconds from the first rank's start within which a moment is drawn
LIMIT = 10.0  # seconds from a death to the end of the run


def start(folder: Path, total: int) -> subprocess.Popen:
    begun = (folder / "run" / "plan.toml").is_file()
    where = ["--resume", "run"] if begun else ["plan.toml", "-o", "run"]
    line = [sys.executable, "-m", "partita", "train", *where, "--steps", str(total), "--save-every", str(EVERY)]
    return subprocess.Popen(line, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def ranks(run: subprocess.Popen) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    except OSError:
        return []


def partials(root: Path) -> set[tuple[str, int]]:
    """Checkpoints under way, or left by an earlier death."""
    found = set()
    for path in root.glob("*.partial"):
        with contextlib.suppress(OSError):
            found.add((path.name, path.stat().st_ctime_ns))
    return found


def moment(run: subprocess.Popen, root: Path, stale: set, drawn: random.Random, *, saving: bool) -> None:
    """Wait for the moment of the next death."""
    while len(ranks(run)) < 2 and run.poll() is None:
        time.sleep(0.002)
    if not saving:
        time.sleep(drawn.uniform(0.0, LIFE))
        return
    for _ in range(drawn.randint(1, 4)):  # let some saves pass
        while not partials(root) - stale and run.poll() is None:
            time.sleep(0.0002)
        time.sleep(drawn.uniform(0.0, 0.02))


def death(folder: Path, drawn: random.Random, *, saving: bool) -> dict:
    """One life and its end."""
    root = folder / "run" / "checkpoints"
    before, stale = steps(root), partials(root)
    run = start(folder, 1_000_000)
    moment(run, root, stale, drawn, saving=saving)
    seen, writing = steps(root), bool(partials(root) - stale)
    head = (folder / "run" / "metrics.jsonl").read_text().splitlines() if (folder / "run" / "metrics.jsonl").exists() else []
    alive = ranks(run)
    victim = drawn.randrange(len(alive))
    os.kill(alive[victim], signal.SIGKILL)
    began = time.perf_counter()
    first = run.stderr.readline()
    message = time.perf_counter() - began
    said = first + run.communicate(timeout=120)[1]
    left = steps(root)
    stepped = bool(head) and json.loads(head[0])["pids"] == alive
    return {
        "victim": victim,
        "writing": writing,
        "stepped": stepped,
        "message": message,
        "seconds": time.perf_counter() - began,
        "exit": run.returncode,
        "named": f"rank {victim} of 2 was killed by SIGKILL" in said,
        "resumed_from_newest": not stepped or json.loads(head[0])["from_step"] == max(before, default=0),
        "lost": max(0, max(seen, default=0) - max(left, default=0)),
        "newest": max(left, default=0),
        "good": not left or not check(root / f"step-{left[-1]}"),
    }


def told(folder: Path) -> tuple[list[float], list[int]]:
    _, *rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [r["loss"] for r in rows], [r["step"] for r in rows]


def exported(folder: Path) -> str:
    line = [sys.executable, "-m", "partita", "show", "run", "--export", "model.safetensors"]
    subprocess.run(line, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def soak(folder: Path, kills: int, seed: int) -> tuple[list[dict], dict]:
    """All deaths, and whether the end is that of an undisturbed run."""
    drawn = random.Random(seed)
    disturbed, whole = folder / "disturbed", folder / "whole"
    for each in (disturbed, whole):
        each.mkdir()
        (each / "plan.toml").write_text(PLAN)
    deaths = []
    for number in range(kills):
        deaths.append(death(disturbed, drawn, saving=bool(number % 2)))
        print(f"{number + 1:3d} of {kills}: step {deaths[-1]['newest']}, {deaths[-1]['seconds']:.2f} s", file=sys.stderr)
    total = deaths[-1]["newest"] + 2 * EVERY
    for each in (disturbed, whole):
        run = start(each, total)
        _, said = run.communicate(timeout=1200)
        assert run.returncode == 0, said
    curve, numbers = told(disturbed)
    end = {
        "steps": total,
        "each_step_once": numbers == list(range(1, total + 1)),
        "curve_equal": curve == told(whole)[0],
        "parameters_equal": exported(disturbed) == exported(whole),
    }
    return deaths, end


def rows_of(deaths: list[dict], end: dict) -> list[dict]:
    count = lambda key: sum(bool(d[key]) for d in deaths)
    n, slowest = len(deaths), max(d["seconds"] for d in deaths)
    told = max(d["message"] for d in deaths)
    lost = sum(d["lost"] for d in deaths)
    places = f"{count('writing')} while writing a checkpoint, {n - count('stepped')} in set-up"
    return [
        row("deaths of a random rank at random moments", f"{n}", f"{n}: {places}", held=count("writing") > 0),
        row(
            "the command ended with exit 1 and named the rank",
            f"{n} of {n}",
            f"{sum(d['exit'] == 1 and d['named'] for d in deaths)} of {n}",
            held=all(d["exit"] == 1 and d["named"] for d in deaths),
        ),
        row("slowest message after a death (s)", f"<= {LIMIT:g}", round(told, 2), held=told <= LIMIT),
        row("slowest end after a death (s)", f"<= {LIMIT:g}", round(slowest, 2), held=slowest <= LIMIT),
        row("finished checkpoints lost", "0", lost, held=lost == 0),
        row(
            "newest checkpoint good, and the one resumed from",
            f"{n} of {n}",
            f"{sum(d['good'] and d['resumed_from_newest'] for d in deaths)} of {n}",
            held=all(d["good"] and d["resumed_from_newest"] for d in deaths),
        ),
        row(
            f"losses of all {end['steps']} steps, each once, equal an undisturbed run's",
            "bit for bit",
            end["curve_equal"] and end["each_step_once"],
            held=end["curve_equal"] and end["each_step_once"],
        ),
        row("parameters at the end equal", "bit for bit", end["parameters_equal"], held=end["parameters_equal"]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        deaths, end = soak(Path(folder), args.kills, args.seed)
    rows = rows_of(deaths, end)
    if args.out:
        args.out.write_text(json.dumps({"rows": rows, "deaths": deaths, "end": end}, indent=2))
        return 0 if all(r["held"] for r in rows) else 1
    return write(__file__, rows, deaths=deaths, end=end)


if __name__ == "__main__":
    sys.exit(main())
