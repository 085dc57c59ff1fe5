"""Cluster: names, files, every fault at once, and a source beside every number."""

import pytest

from partita.cluster import Curve, catalogue, cluster_of, cores, flatten, from_file, named, probe_path
from partita.errors import Refused


@pytest.mark.law
@pytest.mark.parametrize("table", ["devices", "links", "clusters"])
def test_every_number_has_a_source_and_a_date(table):
    plain = {"per_node"}  # a count in a name, not a measurement
    for key, leaf in flatten(catalogue(table)).items():
        if isinstance(leaf, str) or key.split(".")[-1] in plain:
            continue
        assert set(leaf) == {"value", "source", "date"}, key
        assert leaf["source"], key
        assert leaf["date"], key


@pytest.mark.published
@pytest.mark.parametrize(
    ("device", "key", "value"),  # NVIDIA H100, A100 and Quadro RTX 5000 data sheets, exact
    [
        ("h100", "flop.bfloat16", 989.4e12),
        ("h100", "bandwidth", 3.35e12),
        ("h100", "memory", 80e9),
        ("a100", "flop.bfloat16", 312e12),
        ("a100", "bandwidth", 2.039e12),
        ("rtx5000", "flop.float32", 11.2e12),
        ("rtx5000", "bandwidth", 448e9),
    ],
)
def test_data_sheets(device, key, value):
    assert named(f"1x8-{device}").value(f"device.{key}") == value


@pytest.mark.parametrize(
    ("name", "nodes", "per_node"), [("8x8-h100", 8, 8), ("2048x8-h100", 2048, 8), ("16x4-rtx5000", 16, 4), ("1x2-cpu", 1, 2)]
)
def test_a_name_says_nodes_and_devices(name, nodes, per_node):
    cluster = cluster_of(name)
    assert (cluster.nodes, cluster.per_node, cluster.devices) == (nodes, per_node, nodes * per_node)


@pytest.mark.parametrize("name", ["8x8-z80", "0x8-h100", "h100x8", "", "8x8", "8x8-H100"])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(Refused, match=r"P107(.|\n)*8x8-h100"):
        cluster_of(name)


def test_links_get_slower_outwards():
    cluster = named("8x8-h100")
    assert cluster.link("node").bandwidth > cluster.link("network").bandwidth
    assert cluster.link("node").latency < cluster.link("network").latency


def write(tmp_path, text, name="mine.toml"):
    (tmp_path / name).write_text(text)
    return tmp_path


def test_a_file_overrides_any_number(tmp_path):
    folder = write(
        tmp_path,
        """
        partita = 1
        [cluster]
        base = "4x8-a100"
        nodes = 2
        [device]
        memory = 40e9
        flop.bfloat16 = { value = 250e12, source = "our sweep", date = "2026-02" }
        [links.network]
        bandwidth = 12.5e9
        [band]
        high = 1.2
        """,
    )
    cluster = cluster_of("mine.toml", folder=folder)
    assert (cluster.nodes, cluster.per_node, cluster.backend) == (2, 8, "nccl")
    assert cluster.value("device.memory") == 40e9
    assert cluster.source("device.flop.bfloat16") == "our sweep (2026-02)"
    assert cluster.link("network").bandwidth == pytest.approx(12.5e9 * named("1x8-a100").value("links.network.efficiency"))
    assert cluster.value("band.high") == 1.2
    assert cluster.value("band.low") == named("1x8-a100").value("band.low")


def test_every_fault_of_a_file_at_once(tmp_path):
    folder = write(
        tmp_path,
        """
        partita = 2
        colour = "red"
        [cluster]
        device = "abacus"
        nodes = 0
        backend = "carrier pigeon"
        [device]
        memory = "lots"
        flop.bfloat16 = -1
        wheels = 4
        [links.network]
        bandwidth = { value = 1e9, sauce = "x" }
        """,
    )
    with pytest.raises(Refused) as caught:
        cluster_of("mine.toml", folder=folder)
    found = {(f.code, f.at) for f in caught.value.faults}
    want = {
        ("P101", "mine.toml: colour"),
        ("P112", "mine.toml: partita"),
        ("P107", "mine.toml: cluster.device"),
        ("P112", "mine.toml: cluster.nodes"),
        ("P107", "mine.toml: cluster.backend"),
        ("P102", "mine.toml: device.memory"),
        ("P112", "mine.toml: device.flop.bfloat16"),
        ("P101", "mine.toml: device.wheels"),
        ("P101", "mine.toml: links.network.bandwidth"),
    }
    assert found == want


@pytest.mark.parametrize(("text", "code"), [(None, "P108"), ("= 1", "P109")])
def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path, text, code):
    if text is not None:
        write(tmp_path, text)
    with pytest.raises(Refused, match=code):
        cluster_of("mine.toml", folder=tmp_path)


def test_sections_that_are_no_tables_are_refused(tmp_path):
    folder = write(tmp_path, "partita = 1\ncluster = 3\ndevice = 4\nlinks = 5\nmeasured = 6")
    with pytest.raises(Refused) as caught:
        cluster_of("mine.toml", folder=folder)
    assert len(caught.value.faults) == 4


def test_measured_rows_are_read_and_bad_ones_refused(tmp_path):
    good = """
    partita = 1
    [cluster]
    device = "cpu"
    [measured]
    source = "probe"
    ops = [{ op = "gelu", dtype = "float32", points = [[10.0, 1.0], [20.0, 2.0]] }]
    products = [{ dtype = "float32", count = 1, m = 2, n = 3, k = 4, seconds = 1e-6 }]
    collectives = [{ op = "all_reduce", ranks = 2, points = [[8.0, 1e-4]] }]
    residuals = { matmul = 0.02 }
    """
    measured = from_file(write(tmp_path, good) / "mine.toml").measured
    assert measured.ops["gelu", "float32"](15) == 1.5
    assert measured.products[0].rate == pytest.approx(48e6)
    assert measured.collectives["all_reduce", 2](8) == 1e-4
    bad = good.replace("[20.0, 2.0]", "[10.0, 2.0]").replace("seconds = 1e-6", "seconds = 0.0").replace("ranks = 2", "rank = 2")
    with pytest.raises(Refused) as caught:
        from_file(write(tmp_path, bad) / "mine.toml")
    assert [f.at for f in caught.value.faults] == [
        f"mine.toml: measured.{name}.0" for name in ("ops", "collectives", "products")
    ]


def test_here_without_a_probe_says_so_and_with_one_uses_it(tmp_path):
    bare = cluster_of("here", probe_dir=tmp_path)
    assert bare.open_ended
    assert bare.per_node == cores()
    assert "no probe" in bare.notes[0]
    probe_path(tmp_path).write_text('partita = 1\n[cluster]\ndevice = "cpu"\nper_node = 2\n[device]\nbandwidth = 5e9\n')
    probed = cluster_of("here", probe_dir=tmp_path)
    assert probed.name == "here"
    assert probed.open_ended
    assert probed.value("device.bandwidth") == 5e9
    assert not probed.notes


def test_ranks_of_a_cpu_node_share_its_memory():
    cluster = named("1x4-cpu")
    assert cluster.room(4) < cluster.room(2) < cluster.value("device.memory")
    assert named("1x8-h100").room(8) == named("1x8-h100").room(1)


def test_a_curve_is_straight_between_points_and_in_proportion_beyond():
    curve = Curve((10.0, 20.0), (1.0, 3.0))
    assert [curve(x) for x in (1, 10, 15, 20, 40)] == [1.0, 1.0, 2.0, 3.0, 6.0]
