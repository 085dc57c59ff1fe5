"""Planning for a machine one does not have: a 7-billion Llama on 64 H100s, in seconds, on a laptop."""

import partita as pt

if __name__ == "__main__":
    workload = pt.Workload("llama2-7b", batch=512, accumulate=32, dtype="bfloat16", master="float32")
    choices = pt.plan(workload, on="8x8-h100")
    for choice in choices.plans[:3]:
        print(f"{choice.place}  {choice.family:<36} {choice.figures.step_seconds:.2f} s  {choice.figures.peak / 2**30:.1f} GiB")
    for lost in choices.rejected[:5]:
        print(f"-  {lost.family:<36} {lost.reason}")
    for term in pt.estimate(choices.best).figures.why[:5]:
        print(f"{term.seconds:8.3f} s  {term.term}: {term.amount}, {term.constant}")
