"""What the runtime does by a profile at set hit rates, and the command that measures and tells it."""

import json

import pytest
from profiles import made_up
from typer.testing import CliRunner

from hf_sparse_prr import bench_speculation as module
from hf_sparse_prr.bench_speculation import bench_speculation, played, row_of, table_of, verdict
from hf_sparse_prr.budget import GAIN, LAG, OVER, WINDOW, Policy
from hf_sparse_prr.commands import app, terminal
from hf_sparse_prr.profile import Key, read

KEY = Key("it", "triton", 1, 32, 8, 128, "bfloat16", 1, "quest", 64, 64)
COMMAND = ["bench", "speculation", "--shape", "smollm2", "--selector", "quest", "--context", "1K", "--budget", "512"]
COMMAND += ["--device", "cpu", "--rounds", "1", "--hits", "0.5,1"]


def test_a_try_that_does_not_pay_lasts_until_its_hits_are_known():
    ratios, cost = played(Policy(made_up(KEY, worst=1.25), given=1.0), 4096, 0.0)
    tried = WINDOW + LAG + 1
    assert ratios[:tried] == [1.0] * tried and ratios[tried] == 0.0
    first = 0.25 * tried / OVER
    assert cost == pytest.approx(first * sum(map(bool, ratios[:OVER])) / tried)
    assert first <= cost <= 0.05


def test_where_it_pays_it_stays_on_and_costs_nothing():
    ratios, cost = played(Policy(made_up(KEY), given=1.0), 4096, 1.0)
    assert set(ratios) == {1.0} and cost == pytest.approx(-0.5)


@pytest.mark.parametrize("worst", [1.05, 1.25, 1.5])
@pytest.mark.parametrize("hit", [0.0, 0.5, 0.8, 0.95, 1.0])
def test_what_is_on_is_as_fast_as_asked_and_tries_cost_five_percent(hit, worst):
    row = row_of(made_up(KEY, worst=worst), 4096, hit)
    assert row["cost"] <= 0.05
    assert row["auto_gain"] is None or row["auto_gain"] >= GAIN
    assert (row["gain"] > 1.2) == (row["auto"] > 0) or 1.0 < row["gain"] < 1.2
    assert (row["on_share"] > 0) or row["auto"] == 0


def test_the_verdict_is_of_the_worst_rows():
    tables = [{"contexts": table_of(made_up(KEY, worst=worst), (1.0, 0.9, 0.2))} for worst in (1.05, 1.4)]
    rows = [row for table in tables for at in table["contexts"] for row in at["rows"]]
    found = verdict(tables)
    assert found["largest_cost"] == max(row["cost"] for row in rows) > 0
    assert found["least_gain_on"] == min(row["auto_gain"] for row in rows if row["auto"])
    assert verdict([{"contexts": table_of(made_up(KEY, best=1.2), (0.5,))}])["least_gain_on"] is None


def test_profiles_are_measured_at_the_hit_rates_that_are_asked_for(monkeypatch):
    asked = []

    def measure(shape, contexts, selector, *rest):
        asked.append((shape, selector, rest[-1]))
        return made_up(KEY._replace(selector=selector), contexts=tuple(contexts))

    monkeypatch.setattr(module, "bench_profile", measure)
    found = bench_speculation(hits=(0.5, 1.0), contexts=(1024, 4096))
    shapes, selectors = ("llama-3.1-8b", "glm-4-9b"), ("quest", "infllm_v2")
    assert asked == [(shape, selector, [1.0, 0.5, 0.0]) for shape in shapes for selector in selectors]
    assert [each["shape"] for each in found["tables"]] == ["llama-3.1-8b"] * 2 + ["glm-4-9b"] * 2
    assert [at["context"] for at in found["tables"][0]["contexts"]] == [1024, 4096]


def test_the_command_measures_keeps_profiles_and_reads_them_again(tmp_path):
    result = CliRunner().invoke(app, [*COMMAND, "--output", tmp_path])
    assert result.exit_code == 0, result.output
    *lines, last = result.stdout.splitlines()
    document = json.loads(last)
    assert "smollm2, quest" in "\n".join(lines) and "asked: 1.10x" in "\n".join(lines)
    (path,) = tmp_path.iterdir()
    profile = read(path)
    assert path.name == profile.key.file_name and len(profile.made["sources"]) == 12
    assert [cell.hit_rate for cell in profile.contexts[0].cells] == [1.0, 0.5, 0.0]
    (table,) = document["tables"]
    assert [row["serial_us"] for row in table["contexts"][0]["rows"]] == [profile.contexts[0].serial] * 2
    again = CliRunner().invoke(app, ["bench", "speculation", "--profile", path, "--hits", "0.5,1", "--json"])
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["tables"][0]["contexts"] == table["contexts"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--hits", "2"], ("--hits", "0 to 1")),
        (["--shape", "gpt2"], ("shape", "gpt2")),
        (["--context", "2M"], ("context", "2097152")),
        (["--profile", "nowhere.json"], ("nowhere.json", "expected JSON")),
        (["--output", "/dev/null"], ("--output", "expected a folder")),
        (["--output", "/dev/null/x"], ("--output", "expected a folder")),
    ],
)
def test_the_command_refuses_what_cannot_be(arguments, words):
    result = CliRunner().invoke(app, [*COMMAND, *arguments])
    assert result.exit_code == terminal.EXIT_USAGE, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line
