"""Pipeline schedules as data: generators, the clock that plays them, checks, and the text file of a user's own."""

from partita.program.schedules.action import Action, Pass, Schedule, loop, vee
from partita.program.schedules.checking import faults_of
from partita.program.schedules.clock import Durations, Stuck, Timetable, alive, held_peak, in_flight, play
from partita.program.schedules.filled import gpipe, interleaved, looped_bfs, one_f_one_b
from partita.program.schedules.laws import SCHEDULES, Method, generate, laws_of
from partita.program.schedules.split_backward import dualpipev, zbv, zero_bubble
from partita.program.schedules.text import read, unfit, write

__all__ = [
    "SCHEDULES",
    "Action",
    "Durations",
    "Method",
    "Pass",
    "Schedule",
    "Stuck",
    "Timetable",
    "alive",
    "dualpipev",
    "faults_of",
    "generate",
    "gpipe",
    "held_peak",
    "in_flight",
    "interleaved",
    "laws_of",
    "loop",
    "looped_bfs",
    "one_f_one_b",
    "play",
    "read",
    "unfit",
    "vee",
    "write",
    "zbv",
    "zero_bubble",
]
