"""How flags are read, what they are by default, and how wrong ones are refused"""

import dataclasses
import inspect
import sys

import hopplus_mcts
import hopplus_ppo as hop
import pretrain_vae
import pretrain_world_model
import stag_hunt_env as game
from evaluation.strangers import STRANGER_PROBS
from stag_hunt_env import StagHuntConfig

import pytest
import torch
from helpers import refused, start_script

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
    ("hopplus", "cpu", 4): (64, 100_000, 2e-3, 4, 4, 64, 0.85),
    ("hopplus", "cpu", 8): (64, 350_000, 2e-3, 4, 4, 64, 0.85),
}


@pytest.mark.parametrize(("method", "device", "size"), SETTINGS)
def test_settings_by_method_device_and_board(method, device, size):
    """The same in both scripts; without search, that one has no planner"""
    args = hop.default_args(method, device, size * size)
    found = args.num_envs, args.total_timesteps, args.learning_rate, args.update_epochs
    found += args.num_minibatches, args.policy_hidden, args.watched_starts
    assert found == SETTINGS[method, device, size]
    models = args.subgoal_updates, args.subgoal_batch_size, args.wm_updates, args.wm_batch_size
    models += args.pretraining_updates, args.pretraining_games
    assert models[:5] == ((4, 64, 4, 1024, 800) if (method, device) == ("ppo", "cuda") else (1, 8, 2, 256, 200))
    assert (args.kl_coef, args.trust_exact_match) == (1e-3, 0.99), "with a KL of 0.01 subgoals collapse"
    for name in {"ppo": ("ppo", "ppo-omg")}.get(method, (method,)):
        args, other = (script.default_args(name, device, size * size) for script in (hop, hopplus_mcts))
        assert other.planner == "none"
        assert vars(args) | {"exp_name": other.exp_name} == {key: vars(other)[key] for key in vars(args)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_search_and_hop_have_their_own_flags(device):
    search, hop_flags = (vars(hopplus_mcts.default_args(method, device)) for method in ("hopplus-mcts", "hop"))
    sizes = search["num_simulations"], search["num_trees"], search["num_envs"], search["total_timesteps"]
    assert sizes == ((8, 1, 64, 40_000) if device == "cpu" else (16, 2, 256, 600_000))
    assert not search["imagination"] and search["planner"] == "mcts"
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
    assert {name for name in search if search[name] != hop_flags[name]} <= expected.keys() | derived


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_explained(name):
    """Behind it or below it, and so in --help"""
    source = inspect.getsource(SCRIPTS[name].Args) + inspect.getsource(StagHuntConfig)
    flags = {field.name for kind in (SCRIPTS[name].Args, StagHuntConfig) for field in dataclasses.fields(kind)}
    for flag in flags - {"config", "device", "wm_learning_rate"}:
        line, after = source.split(f"    {flag}: ", 1)[1].split("\n", 2)[:2]
        assert "  # " in line or (after.startswith('    """') and len(after) > 12), flag


# ---- What is refused

REFUSED = [  # one for each kind of check
    ("--num-envs 0", "num_envs must be 1 "),
    ("--learning-rate nan", "learning_rate must be 0 "),
    ("--ppo-real-ratio 2", "ppo_real_ratio must be 0 to 1, not 2.0"),
    ("--method ppo --vae-checkpoint vae.pt", "a pretrained model that nothing reads"),
    ("--device cuda", "--device cuda: no GPU here"),
    ("--ppo-real-ratio 0 --critic-data real", "the critic has no data"),
    ("--num-minibatches 9999", "more minibatches than samples"),
    ("--seats random,random,random,random", "nobody learns"),
    ("--seats learner,learner,learner,waiting", "unknown players ['waiting']"),
    ("--goal-kind discrete --goal-dim 1", "discrete needs --goal-dim 2"),
    ("--height 16 --width 16", "more than 255 cells or steps"),
    ("--final-time 300", "more than 255 cells or steps"),
    ("--resume nowhere", "there is no nowhere"),
    ("--vae-checkpoint nowhere.pt", "there is no nowhere.pt"),
]
OF_SEARCH = [
    ("--root gumbel --policy-loss ppo", "--root gumbel needs --policy-loss distill"),
    ("--method hop --goal-dim 3", "--subgoals hop needs --goal-kind discrete --goal-dim 2"),
    ("--method hop --imagination", "--subgoals hop is not for --imagination"),
]


@pytest.fixture
def no_strangers(monkeypatch):
    """Other tests in this process may have imported them"""
    for name in STRANGER_PROBS:
        monkeypatch.delitem(game.PLAYER_PROBS, name, raising=False)


CASES = [(hop, *case) for case in REFUSED] + [(hopplus_mcts, *case) for case in OF_SEARCH]


@pytest.mark.parametrize(("script", "words", "said"), CASES, ids=[words for _, words, _ in CASES])
def test_wrong_flags_end_before_anything_is_written(script, words, said, no_strangers, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, start_script, script, *words.split())
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_has_one_thread_and_says_in_one_line_what_the_game_refuses(name, monkeypatch, capsys):
    """Unless more threads are asked for: two that wait for each other are slow"""
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)
    line = refused(capsys, start_script, SCRIPTS[name], "--population", "randon")
    assert line.startswith("error: unknown players ['randon']") and torch.get_num_threads() == 1
