"""Lists that name everything of this repository; a fork that adds a setting or a statistic may leave them."""
import dataclasses
import json

import data
import test_oracle
from grpo import ALGOS, Config, main
from run import setup
from test_data_flow import BASE, SETTINGS, STAGES
from test_variants import FILES, KNOWN
from test_warm_start import CFG, COUNTS, OTHERS


def test_every_setting_is_turned():
    for f in dataclasses.fields(Config):
        if f.name == "task_args":       # OWN
            continue
        assert f.name in SETTINGS, f"add a line for the new setting {f.name} to SETTINGS in tests/test_data_flow.py"
        base, values = SETTINGS[f.name]
        own = {(BASE | base).get(f.name, f.default), *values}
        missing = ({False, True} if f.type is bool else set(getattr(f.type, "__args__", ()))) - {"cuda", "mps"} - own
        assert not missing, f"add the new choices {missing} of {f.name} to SETTINGS in tests/test_data_flow.py"
        assert set(values.values()) <= {*STAGES, None} and len(own) == 1 + len(values), f.name


def test_every_setting_counts_for_a_kept_warm_start_or_is_rls_alone():
    """By the heading in Config under which it stands, and by DEPENDS_ON in run/setup.py."""
    assert {*setup.settings(CFG), "task_args"} == COUNTS.keys()
    assert {f.name for f in dataclasses.fields(Config)} == {*COUNTS, *OTHERS}


def test_every_algorithm_in_a_file_is_in_the_table_of_its_tests():
    assert FILES == KNOWN


def test_there_are_few_flags():
    """A task's own and the modes are not counted."""
    assert len(dataclasses.fields(Config)) - 1 <= 46


def test_every_algorithm_has_a_second_implementation():
    """Those in files: tests/test_variants.py."""
    assert {*ALGOS, "dapo"} == set(test_oracle.ALGOS)


def test_every_statistic_is_logged(tmp_path):
    """By a run with a critic, a reference and a learned reward, or by one of several turns."""
    main(["--algo", "ppo", "--reward", "model", *"--difficulty 1 --n_layer 1 --n_embd 32 --warm_steps 20 "
          "--warm_lr 5e-3 --prompts 2 --group 4 --max_new 12 --held_out 20 --steps 1".split(),
          "--out", str(tmp_path / "a")])
    main(["--task", "guess", *"--n_layer 1 --n_embd 32 --warm_steps 2 --prompts 2 --group 2 --held_out 2 --steps 1".split(),
          "--out", str(tmp_path / "b")])
    lines = [json.loads(line) for name in "ab" for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    assert data.STATISTICS <= set().union(*lines)
