"""How flags are read, what they are by default, and how wrong ones are refused"""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import hopplus_mcts
import hopplus_ppo as hop
import pretrain_vae
import pretrain_world_model
import stag_hunt_env as game
from evaluation.strangers import STRANGER_PROBS
from stag_hunt_env import StagHuntConfig, StagHuntEnv

import pytest
import torch

ROOT = Path(game.__file__).resolve().parent
SCRIPTS = {script.__name__: script for script in (hop, hopplus_mcts, pretrain_vae, pretrain_world_model)}


def parse(monkeypatch, script, words):
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *words.split()])
    return script.parse_args()


# ---- Defaults


def test_flags_change_the_defaults_of_method_device_and_board(monkeypatch):
    assert parse(monkeypatch, hop, "") == hop.default_args("hopplus", "cpu")
    assert parse(monkeypatch, hop, "--method ppo --device=cpu") == hop.default_args("ppo", "cpu")
    words = "--device cpu --height 8 --no-anneal-lr --seats learner,mixed,mixed,random --seed 5"
    expected = {"anneal_lr": False, "seats": "learner,mixed,mixed,random", "seed": 5, "total_timesteps": 350_000}
    expected["config"] = dataclasses.replace(StagHuntConfig(), height=8)
    assert parse(monkeypatch, hop, words) == dataclasses.replace(hop.default_args("hopplus", "cpu"), **expected)
    assert parse(monkeypatch, hopplus_mcts, "") == hopplus_mcts.default_args("hopplus-mcts", "cpu")
    assert parse(monkeypatch, hopplus_mcts, "--method ppo").planner == "none"


SETTINGS = {  # games, steps, learning rate, epochs, minibatches, width, share of watched starts
    ("ppo", "cuda", 4): (1024, 4_000_000, 2e-4, 4, 4, 128, 0.5),
    ("ppo", "cuda", 8): (1024, 4_000_000, 2e-4, 4, 4, 128, 0.5),
    ("ppo", "cpu", 4): (256, 350_000, 1e-3, 3, 4, 64, 0.5),
    ("ppo", "cpu", 8): (1024, 3_500_000, 2e-4, 4, 4, 64, 0.5),
    ("hopplus", "cuda", 4): (256, 2_000_000, 1e-3, 4, 4, 128, 0.5),
    ("hopplus", "cuda", 8): (256, 4_000_000, 1e-3, 4, 4, 128, 0.5),
    ("hopplus", "cpu", 4): (64, 120_000, 2e-3, 4, 4, 64, 0.85),
    ("hopplus", "cpu", 8): (64, 350_000, 2e-3, 4, 4, 64, 0.85),
}


@pytest.mark.parametrize("script", [hop, hopplus_mcts])
@pytest.mark.parametrize(("method", "device", "size"), SETTINGS)
def test_settings_by_method_device_and_board(script, method, device, size):
    args = script.default_args(method, device, size * size)
    found = args.num_envs, args.total_timesteps, args.learning_rate, args.update_epochs
    found += args.num_minibatches, args.policy_hidden, args.watched_starts
    assert found == SETTINGS[method, device, size]
    assert (args.critic_data, args.imagined_weight, args.trust_exact_match, args.unsteady) == ("mixed", 1, 0.99, 0.5)
    assert (args.kl_coef, args.ppo_real_ratio) == (1e-3, 0.5), "with a KL of 0.01 subgoals collapse"
    models = args.subgoal_updates, args.subgoal_batch_size, args.wm_updates, args.wm_batch_size
    models += args.pretraining_updates, args.pretraining_games
    assert models == ((1, 8, 2, 256, 200, 64) if device == "cpu" else (4, 64, 4, 1024, 800, 1024))
    if method == "ppo":  # with subgoals: the same but for these
        with_subgoals = {"method": "ppo-omg", "subgoals": "inferred", "memory_discount": 0.9}
        assert script.default_args("ppo-omg", device, size * size) == dataclasses.replace(args, **with_subgoals)
    other = vars(hop.default_args(method, device, size * size))
    of_both = vars(args).keys() & other.keys() - {"exp_name"}
    assert all(vars(args)[name] == other[name] for name in of_both), "in both scripts"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_search_and_hop_have_their_own_flags(device):
    search, hop_flags = (vars(hopplus_mcts.default_args(method, device)) for method in ("hopplus-mcts", "hop"))
    sizes = search["num_simulations"], search["num_trees"], search["num_envs"], search["total_timesteps"]
    assert sizes == ((8, 1, 64, 40_000) if device == "cpu" else (16, 2, 256, 600_000))
    shared = {"planner", "imagination", "imagination_horizon", "num_simulations", "num_envs", "total_timesteps"}
    differ = {name for name in search if search[name] != hop_flags[name]}
    assert not differ & shared and not search["imagination"] and search["planner"] == "mcts"
    expected = {
        "subgoals": "hop",
        "goal_kind": "discrete",
        "goal_dim": 2,
        "num_trees": 5,
        "search_model": "env",
        "search_prior": 0.0,
        "pretraining_updates": 0,
        "offline_ratio": 0.0,
        "gae_lambda": 1.0,
        "ent_coef": 0.0,
        "history_reset_prob": 0.0,
    }
    assert {name: hop_flags[name] for name in expected} == expected
    derived = {"method", "has_models", "has_world", "goal_size", "distribution_size", "pretrains"}
    assert differ <= expected.keys() | derived


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_explained(name):
    """Behind it or below it, and so in --help"""
    source = inspect.getsource(SCRIPTS[name].Args) + inspect.getsource(StagHuntConfig)
    flags = {field.name for kind in (SCRIPTS[name].Args, StagHuntConfig) for field in dataclasses.fields(kind)}
    for flag in flags - {"config", "device", "wm_learning_rate"}:
        line, after = source.split(f"    {flag}: ", 1)[1].split("\n", 2)[:2]
        assert "  # " in line or (after.startswith('    """') and len(after) > 12), flag


# ---- What is refused

OF_THE_SCRIPT = [  # one for each kind of check
    ("--nonsense 3", "--nonsense"),
    ("--num-envs three", "three"),
    ("--method dqn", "dqn"),
    ("--goal-kind cubic", "cubic"),
    ("--num-envs 0", "num_envs must be 1 "),
    ("--learning-rate nan", "learning_rate must be 0 "),
    ("--seed -1", "seed must be 0 "),
    ("--ppo-real-ratio 2", "ppo_real_ratio must be 0 to 1, not 2.0"),
    ("--method ppo --vae-checkpoint vae.pt", "a pretrained model that nothing reads"),
    ("--method ppo --world-model-checkpoint wm.pt", "a pretrained model that nothing reads"),
    ("--device cuda", "--device cuda: no GPU here"),
    ("--ppo-real-ratio 0 --critic-data real", "the critic has no data"),
    ("--num-minibatches 9999", "more minibatches than samples"),
    ("--seats random,random,random,random", "nobody learns"),
    ("--seats learner,learner,learner,waiting", "unknown players ['waiting']"),
    ("--population random,randon", "randon"),
    ("--redraw 1.5", "redraw must be game, never or a probability"),
    ("--goal-kind discrete --goal-dim 1", "discrete needs --goal-dim 2"),
    ("--height 2 --width 2", "too little room: 9 players and prey, 4 cells"),
    ("--height 16 --width 16", "more than 255 cells or steps"),
    ("--final-time 300", "more than 255 cells or steps"),
    ("--run-dir setup.py --method ppo", "setup.py"),
    ("--resume nowhere", "there is no nowhere"),
    ("--vae-checkpoint nowhere.pt", "there is no nowhere.pt"),
    ("--world-model-checkpoint setup.py", "setup.py is damaged or no checkpoint"),
]


@pytest.mark.parametrize(("words", "said"), OF_THE_SCRIPT, ids=[words for words, _ in OF_THE_SCRIPT])
def test_wrong_flags_end_before_anything_is_written(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.py").touch()
    for name in STRANGER_PROBS:  # other tests in this process have them
        monkeypatch.delitem(game.PLAYER_PROBS, name, raising=False)
    with pytest.raises((SystemExit, ValueError, OSError)) as stop:  # the last two: one line, where the script is run
        hop.main(parse(monkeypatch, hop, words))
    text = capsys.readouterr().err if stop.type is SystemExit else str(stop.value)
    assert said in re.sub(r"[\s│]+", " ", text)
    assert stop.type is not SystemExit or stop.value.code in (1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["setup.py"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_the_game_refuses_is_one_line_of_each_script(name, tmp_path):
    """Also with one thread, unless more are asked for: two that wait for each other are slow"""
    source = "import sys, runpy, torch; sys.argv = sys.argv[1:]\n"
    source += "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    source += "finally:\n    print(torch.get_num_threads())"
    words = ["--population", "randon", "--device", "cpu"]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", source, str(ROOT / f"{name}.py"), *words]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 1 and found.stdout.strip() == "1"
    (line,) = found.stderr.strip().splitlines()
    assert line.startswith("error: unknown players ['randon']") and not any(tmp_path.iterdir())


# ---- The game's own


def test_a_negative_seed_is_refused_and_changes_nothing():
    env = StagHuntEnv(num_envs=3, seed=4)
    with pytest.raises(ValueError, match="a seed must be 0 or more, not -1"):
        env.reset(seed=-1)
    same = StagHuntEnv(num_envs=3, seed=4)
    assert torch.equal(env.state.position, same.state.position)
    assert torch.equal(env.reset(), same.reset())
