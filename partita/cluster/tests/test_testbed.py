"""A testbed in a plan: what is read, what is refused, and that figures follow rate, delay and hosts."""

import pytest

import partita as pt
from partita.cli.facts import facts_of
from partita.cluster import Testbed, cluster_of
from partita.cost.collective import charge, crowding, route_of
from partita.errors import Refused
from partita.mesh import Mesh
from partita.plans import load_text
from partita.strategies import GARDEN

PLAN = """
partita = 1
[workload]
model = "gpt"
[cluster]
name = "testbed"
hosts = 4
rate = "100 Mbit/s"
ranks = 4
{more}
[mesh]
dp = 4
[[strategy]]
name = "ddp"
"""


def read(more=""):
    return load_text(PLAN.format(more=more), strategies=GARDEN)


def test_a_plan_names_its_testbed_and_reads_back():
    plan = read('delay = "5 ms"')
    assert plan.cluster == Testbed(hosts=4, rate=12.5e6, delay=0.005)
    again = load_text(plan.to_toml(), strategies=GARDEN)
    assert again == plan
    assert again.hash == plan.hash


def test_a_rate_spelt_otherwise_is_the_same_plan_and_another_rate_another():
    assert load_text(PLAN.format(more="").replace("100 Mbit/s", "0.1 Gbit/s"), strategies=GARDEN).hash == read().hash
    assert load_text(PLAN.format(more="").replace("100 Mbit/s", "200 Mbit/s"), strategies=GARDEN).hash != read().hash
    assert pt.Plan(cluster="testbed").cluster == Testbed()


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("rate", '"fast"', "P112"), ("rate", "100", "P102"), ("rate", '"0 bit/s"', "P112"), ("hosts", "0", "P112"),
        ("hosts", "2.5", "P102"), ("hosts", "true", "P102"), ("delay", '"-1 ms"', "P112"), ("delay", '"2 s"', "P112"),
        ("fallback", '"here"', "P107"), ("speed", "1", "P101"),
    ],
)  # fmt: skip
def test_a_bad_setting_is_refused_with_its_place(key, value, code):
    lines = [line for line in PLAN.splitlines() if not line.startswith(f"{key} =")]
    text = "\n".join(lines).replace("{more}", f"{key} = {value}")
    with pytest.raises(Refused) as refused:
        load_text(text, strategies=GARDEN)
    (fault,) = refused.value.faults
    assert (fault.code, fault.at) == (code, f"plan.toml: cluster.{key}")
    assert fault.cure


def test_only_a_testbed_has_hosts():
    with pytest.raises(Refused, match="unknown key 'hosts'"):
        load_text(PLAN.format(more="").replace('"testbed"', '"here"'), strategies=GARDEN)


def seconds(ranks=2, size=1 << 20, **settings):
    bed = Testbed.of(**settings)
    cluster, mesh = cluster_of(bed, ranks=ranks), Mesh.of({"dp": ranks})
    return charge("all_reduce", size, route_of("dp", mesh, cluster), cluster).seconds


@pytest.mark.law
def test_time_is_the_rates_the_delays_and_the_hosts():
    slow = seconds(hosts=2, rate="100 Mbit/s")
    assert slow == pytest.approx((1 << 20) / (12.5e6 * 1448 / 1514), rel=0.02)
    assert seconds(hosts=2, rate="10 Mbit/s") == pytest.approx(10 * slow, rel=0.02)
    assert seconds(hosts=2, rate="100 Mbit/s", delay="5 ms") - slow == pytest.approx(4 * 0.005)
    assert seconds(ranks=4, hosts=2, rate="100 Mbit/s") > slow  # 3/2 of the bytes cross the same link
    assert seconds(hosts=1, rate="10 Mbit/s") < slow / 10  # ranks of one host do not use its link


def test_hosts_share_this_machines_cores_and_memory():
    here, bed = cluster_of("here"), cluster_of(Testbed(hosts=4), ranks=4)
    assert crowding(4, bed) == crowding(4, here)
    assert bed.room(4) == pytest.approx(here.room(4))


def test_a_name_shows_the_cluster_and_not_its_link():
    facts = facts_of("testbed")
    assert facts["cluster"] == "testbed"
    assert facts["nodes"] == 2
