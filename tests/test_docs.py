"""Every command in README, docs and docstrings is one that the scripts understand."""

import re
import shlex
from pathlib import Path

import pytest

import hopplus_mcts
import hopplus_ppo
import pretrain_vae
import pretrain_world_model
import stag_hunt_env
from stag_hunt_env import parse

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {
    "stag_hunt_env.py": stag_hunt_env.Args,
    "pretrain_world_model.py": pretrain_world_model.Args,
    "pretrain_vae.py": pretrain_vae.Args,
    "hopplus_ppo.py": hopplus_ppo.Args,
    "hopplus_mcts.py": hopplus_mcts.Args,
}
TEXTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md"), *(ROOT / name for name in SCRIPTS)]


def commands():
    found = set()
    for path in TEXTS:
        for line in path.read_text().splitlines():
            for command in re.findall(r"(?:python|torchrun)[^`#&|]*?(\w+\.py[^`#&|]*)", line):
                script, *flags = shlex.split(command.replace("'", ""))
                if script in SCRIPTS and line.strip().startswith(("python", "torchrun", ".venv", "`python", "CUDA", "nohup")):
                    found.add((script, *flags))
    return sorted(found)


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_the_command_is_understood(command):
    script, *flags = command
    if "--help" in flags:
        return
    parse(SCRIPTS[script], flags)


def test_there_are_many_commands():
    assert len(commands()) > 40


def test_switches_that_may_be_none():
    args = parse(hopplus_ppo.Args, ["--no-imagination", "--inter-episode-belief", "--seed", "3"])
    assert args.imagination is False and args.inter_episode_belief is True and args.seed == 3
    args = parse(hopplus_ppo.Args, ["--imagination", "False", "--no-trust", "--height", "8", "--imagination"])
    assert args.imagination is True and args.trust is False and args.config.height == 8
    assert parse(hopplus_ppo.Args, []).imagination is None
