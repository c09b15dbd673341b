"""The commands in README, docs and docstrings (those at the beginning of a line) are ones that the scripts understand."""

import re
import shlex
from pathlib import Path

import pytest
from helpers import TINY

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


def test_the_ablation_of_the_readme_is_the_whole_edit(tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text()
    hunks = re.search(r"```diff\n.*?\n(@@.*?)```", text, re.S)[1].split("@@ @@\n")[1:]
    script = (ROOT / "hopplus_ppo.py").read_text()
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    (tmp_path / "my_ablation.py").write_text(script)
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_ablation

    for name in ("draw_pictures", "film"):
        monkeypatch.setattr(my_ablation, name, lambda *_: None)
    seen, improve = [], my_ablation.improve
    monkeypatch.setattr(my_ablation, "improve", lambda a, p, o, batch, g: (seen.append(batch), improve(a, p, o, batch, g))[1])
    flags = {**TINY, "total_steps": 32, "run_dir": str(tmp_path / "runs"), "depth_discount": 0.5}
    my_ablation.main(my_ablation.Args(**flags))
    weights = seen[0]["weight"][seen[0]["real"] == 0]
    assert set(weights.tolist()) <= {0.0, 1.0, 0.5, 0.25, 0.125} and (weights == 0.25).any()


def test_there_are_many_commands():
    assert len(commands()) > 40


def test_switches_that_may_be_none():
    args = parse(hopplus_ppo.Args, ["--no-imagination", "--inter-episode-belief", "--seed", "3"])
    assert args.imagination is False and args.inter_episode_belief is True and args.seed == 3
    args = parse(hopplus_ppo.Args, ["--imagination", "False", "--no-trust", "--height", "8", "--imagination"])
    assert args.imagination is True and args.trust is False and args.config.height == 8
    assert parse(hopplus_ppo.Args, []).imagination is None
