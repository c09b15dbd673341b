"""evaluation/inspector.py: every number of the page is the script's, at its step, about its player."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import hopplus_mcts
import hopplus_ppo
import stag_hunt_env as game
from evaluation import evaluate, inspector, runs
from stag_hunt_env import HUNT_STAG, StagHuntConfig

import chromium
import numpy as np
import pytest
import torch
from helpers import write_checkpoint

ROOT = Path(game.__file__).resolve().parent
CONFIG = StagHuntConfig(height=3, width=4, num_players=3, num_hares=3, final_time=6)
TINY = {
    **{"config": CONFIG, "num_envs": 4, "num_steps": 8, "policy_hidden": 16, "subgoal_hidden": 8, "goal_dim": 4},
    **{"wm_hidden": 16, "imagination_horizon": 4, "pretraining_games": 4},
}
MIXED = {"seats": "mixed,learner,mixed", "redraw": "never", "population": "nearest_stag,nearest_hare"}
CASES = {  # script, method, flags
    "hopplus": (hopplus_ppo, "hopplus", {}),
    "shared": (hopplus_ppo, "hopplus", {"share_parameters": True}),
    "ppo": (hopplus_ppo, "ppo", {}),
    "partners": (hopplus_ppo, "ppo-omg", MIXED),
    "new partners": (hopplus_ppo, "ppo-omg", {**MIXED, "redraw": "game"}),
    "discrete": (hopplus_ppo, "ppo-omg", {"goal_kind": "discrete"}),
    "actions": (hopplus_ppo, "ppo-omg", {"subgoals": "actions"}),
    "none": (hopplus_ppo, "hopplus", {"subgoals": "none"}),
    "discrete imagined": (hopplus_ppo, "hopplus", {**MIXED, "goal_kind": "discrete"}),
    "search": (hopplus_mcts, "hopplus-mcts", {"num_simulations": 3, "num_trees": 2}),
    "hop": (hopplus_mcts, "hop", {"num_simulations": 2, "num_trees": 2, "goal_dim": 2}),
}


def checkpoint(folder: Path, script, method: str, **changes) -> Path:
    """Learners that are not trained, but are sure of what they say"""
    args = script.make_args(method, "cpu", **{**TINY, **changes})
    table = game.seats_table(args.seats, args.config.num_players)
    state = script.make_train_state(args, [table] * args.num_seeds, list(range(args.num_seeds)), torch.device("cpu"))
    for network in (network for network in state.networks if network is not None):
        for name, p in network.params.items():
            if name.startswith(("head", "actor", "critic")) and name.endswith("weight"):
                p.data *= 30 if p.data.std() < 0.02 else 3
    content = {"format": script.FORMAT, "args": dataclasses.asdict(args), "states": [state.state_dict()]}
    content["script"] = {"name": Path(script.__file__).name, "sha256": "of another version"}
    write_checkpoint(folder / "checkpoint.pt", content)
    return folder / "checkpoint.pt"


@pytest.fixture(scope="module", autouse=True)
def less_work():
    before = inspector.GOAL_DRAWS
    inspector.GOAL_DRAWS = 3
    yield
    inspector.GOAL_DRAWS = before


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Name of a case -> Run"""

    @functools.cache
    def load(case: str, *words):
        script, method, changes = CASES[case]
        path = checkpoint(tmp_path_factory.mktemp("run"), script, method, **changes)
        return inspector.parse_args([str(path), "--device", "cpu", *words]).run

    return load


@pytest.fixture(scope="module")
def look(load):
    """Name of a case, number of samples -> what the page shows"""

    @functools.cache
    def look(case: str, samples: int = 2):
        return inspector.inspect_run(
            load(case),
            None,
            games=4,
            places=2,
            steps_ahead=1,
            samples=samples,
            seed=3,
        )

    return look


# ---------------------------------------------------------------------------------------------------------------------
# The same games, watched by this file


@torch.no_grad()
def watch(run, places: int, seed: int, num_steps: int):
    """Plays as the inspector does. -> what was seen and what was thought before each step, [step][...]"""
    script, config = run.script, run.args.config
    table = game.seats_table(run.args.seats, config.num_players)
    sitting = [seat for seat, name in enumerate(table) if name == "learner"]
    index = [0] if run.args.share_parameters else list(range(len(sitting)))
    state = runs.seat_learners(run, [table], seed, index, num_envs=places)
    games, args, networks = state.games, state.args, state.networks
    env = games.env
    plans, taken, steps = [], [], []
    act, plan = env.advance, getattr(script, "plan_actions", None)
    env.advance = lambda actions: taken.append(actions.clone()) or act(actions)
    if plan is not None:
        script.plan_actions = lambda *given: plans.append(plan(*given)) or plans[-1]

    def mine(x):  # [B, N, ...] -> [M, E, ...], the learners' own
        by_seat = [x[:, i] for i in sitting]
        return torch.cat(by_seat)[None] if args.share_parameters else torch.stack(by_seat)

    def everybody_s(x):  # [B, ...] -> [B, N, ...]
        return x[:, None].expand(-1, config.num_players, *x.shape[1:])

    for _ in range(num_steps):
        before, history, last = game.copy_state(env.state), games.history.clone(), games.last_joint.clone()
        board = mine(env.cells(before))
        walls = mine(everybody_s(before.walls[:, :1]))  # there are none
        clock = mine(everybody_s(before.time / config.final_time))
        thought = {"returns": env.episode_return.clone(), "state": before, "history": history}
        views = script.entity_views(env, board, walls)
        goals = torch.zeros(*clock.shape, 0)
        if networks.inference is not None:
            belief = script.infer_opponents(args, env, networks, views, clock, history)
            thought |= {"belief": belief, "clock": clock}
            goals = belief.goals
        *_, log_probs, value = script.evaluate_policy(args, networks.policy, views, clock, last, goals)
        runs.play(run, state, 1)
        thought |= {
            "policy": log_probs.exp(),
            "value": value,
            "actions": taken[-1],
            "plan": plans[-1] if plans else None,
        }
        steps.append(thought | {"network": networks, "args": args, "env": env})
    if plan is not None:
        script.plan_actions = plan
    return sitting, steps


def by_step(data, places):
    """(game, number of the step in its place, step of the game), in the order of the page"""
    played = [0] * places
    for shown in data["games"]:
        for t in range(len(shown["actions"])):
            yield shown, played[shown["place"]], t
            played[shown["place"]] += 1


def moa_of(run, step):
    """[M, n, K, 7] MOA averaged over subgoals"""
    args, networks, belief, clock = step["args"], step["network"], step["belief"], step["clock"]
    rows = belief.params.shape[:2]
    if args.goal_kind == "discrete":
        share = belief.params.softmax(-1).view(*belief.present.shape, -1)
        found = 0
        for k in range(args.goal_dim):
            goal = torch.nn.functional.one_hot(torch.full(rows, k), args.goal_dim).float()
            seen = (belief.board, belief.walls, clock.repeat_interleave(belief.present.shape[2], 1))
            said = networks.moa(*seen, goal, belief.legal).exp()
            found += share[..., k, None] * said.view(*belief.present.shape, 7)
        return found
    torch.manual_seed(0)
    draws = run.script.goal_noise(args, inspector.GOAL_DRAWS, device="cpu")
    said = [run.script.predict_actions(args, networks, belief, clock, draw.expand(*rows, -1)) for draw in draws]
    return torch.stack(said).exp().mean(0)


def close(shown, expected):
    assert (torch.as_tensor(shown) - torch.as_tensor(expected)).abs().max() < 1e-4, (shown, expected)


@pytest.mark.parametrize("case", [case for case in CASES if case != "new partners"])
@torch.no_grad()
def test_the_numbers_are_the_script_s(case, load, look):
    run, data, places, n = load(case), look(case), 2, CONFIG.num_players
    needed = max(number for _, number, _ in by_step(data, places)) + 1
    sitting, steps = watch(run, places, 3, needed)
    assert data["goal"] is None if case == "ppo" else len(data["goal"]["names"]) >= 2
    compared = 0
    expected_moa = [moa_of(run, step) if "belief" in step else None for step in steps]
    for shown, number, t in by_step(data, places):
        step, place = steps[number], shown["place"]
        state = step["state"]
        assert shown["time"][t] == state.time[place] == t
        cells = torch.where(state.present[place], state.position[place], -1).tolist()
        assert shown["position"][t] == cells and shown["alive"][t] == state.prey_alive[place].int().tolist()
        assert shown["prey"] == state.prey_position[place].tolist()
        assert shown["actions"][t] == step["actions"][place].tolist()
        close(shown["returns"][t], step["returns"][place])
        for i, mind in shown["minds"].items():
            row = (0, sitting.index(i) * places + place) if run.args.share_parameters else (sitting.index(i), place)
            if cells[i] < 0:
                assert mind["value"][t] is None and mind["policy"][t] is None
                continue
            close(mind["value"][t], step["value"][row])
            close(mind["policy"][t], step["policy"][row])
            if step["plan"] is not None:
                plan, tree = step["plan"]
                shape = len(sitting), places, run.args.num_trees
                visits, returns = (x[:, 0].unflatten(0, shape)[row] for x in (tree.visits, tree.returns))  # [trees, 7]
                close(mind["visits"][t], visits.sum(0))
                close(mind["played"][t], plan.played[row])
                close(mind["search"][t], plan.stats[row])
                close(shown["probs"][t][i], plan.played[row])
                tried = visits.amin(0) > 0
                close(torch.tensor(mind["q"][t])[tried], (returns / visits).mean(0)[tried])
            else:
                close(shown["probs"][t][i], step["policy"][row])
            for k, j in enumerate((i + 1 + k) % n for k in range(n - 1)):
                if cells[j] < 0:
                    assert "moa" not in mind or mind["moa"][t][j] is None
                    continue
                compared += 1
                if "belief" in step:
                    close(mind["moa"][t][j], expected_moa[number][(*row, k)])
                    goal = step["belief"].params.unflatten(1, (-1, n - 1))[(*row, k)]
                if run.args.goal_kind == "discrete":
                    close(mind["goal"][t][j], goal.softmax(0))
                if "memory" in mind:
                    kept = step["history"][(*row, k)]
                    close(mind["memory"][t][j], 0.5 + kept[2:] if case == "hop" else kept[[run.args.subgoal_hidden]])
            assert "moa" not in mind or mind["moa"][t][i] is None
    assert compared > 20
    for name in ("moa", "goal", "ahead"):
        assert (name in data["games"][0]["minds"][sitting[0]]) == (name in expected_panels(case)), name


def expected_panels(case):
    return () if case == "ppo" else ("moa", "goal", "ahead")


@pytest.mark.parametrize("case", ["partners", "discrete imagined"])
def test_the_co_players_own_probabilities(case, look):
    """Rule-based ones by their rules, and who they are"""
    data = look(case)
    env = game.StagHuntEnv(CONFIG)
    kinds = set()
    for shown in data["games"]:
        for t, position in enumerate(shown["position"][:-1]):
            alive, time = (torch.tensor([shown[name][t]]) for name in ("alive", "time"))
            cells = torch.tensor([position])
            state = game.State(
                cells.clamp(min=0).int(),
                cells >= 0,
                torch.tensor([shown["prey"]]).int(),
                alive > 0,
                torch.zeros(1, 12, dtype=torch.uint8),
                time.int(),
                time.int() - 1,
            )
            for seat, name in enumerate(shown["names"]):
                if name != "learner":
                    kinds.add(name)
                    close(shown["probs"][t][seat], game.PLAYER_PROBS[name](env, state, seat)[0])
    assert kinds == {"nearest_stag", "nearest_hare"}
    first, second = ([shown["names"] for shown in data["games"] if shown["place"] == place] for place in (0, 1))
    assert all(names == games[0] for games in (first, second) for names in games), "partners stay"


def test_who_took_what_and_the_scores(look):
    for shown in look("hopplus")["games"]:
        final = shown["returns"][-1]
        assert len(shown["position"]) == len(shown["returns"]) == len(shown["actions"]) + 1
        for seat, taken in enumerate(shown["taken"]):
            gone = [t for t, position in enumerate(shown["position"]) if position[seat] < 0]
            assert (taken is None) == (not gone) == (final[seat] == 0)
            if taken:
                assert gone[0] == taken["step"] + 1
                assert taken["prey"] == ("stag" if shown["actions"][taken["step"]][seat] == HUNT_STAG else "hare")
                assert (final[seat] > 1) == (taken["prey"] == "stag")


def test_what_is_carried_over(look):
    """In the first game nothing; in the second the steps in which the co-player was seen, discounted"""
    data = look("partners", 64)
    assert data["carried"] == 0.9
    for place in (0, 1):
        first, second = (shown for shown in data["games"] if shown["place"] == place)
        mind = first["minds"][1]
        for goal, without, memory in zip(mind["goal"], mind["without"], mind["memory"], strict=True):
            assert goal == without and (memory is None or all(x is None or x == [0] for x in memory))
        mind = second["minds"][1]
        for j in (0, 2):
            seen = sum(position[j] >= 0 for position in first["position"][:-1])
            close(mind["memory"][0][j], [0.9 * seen])
            assert mind["goal"][0][j] != mind["without"][0][j]
    assert look("new partners")["carried"] == 0


@pytest.mark.parametrize("case", ["discrete", "discrete imagined"])
def test_one_step_ahead_is_what_moa_expects(case, load):
    """By the game's rules (discrete), by a world model: where MOA sends the co-players, and the policy oneself. The
    untrained world model knows where players cannot go, so only the rules' case is exact."""
    run = load(case)
    data = inspector.inspect_run(run, None, games=1, places=1, steps_ahead=2, samples=500, seed=5)
    assert data["ahead"]["model"] == ("the game's own rules" if case == "discrete" else "its world model")
    target = game.StagHuntEnv(CONFIG).target.tolist()
    compared = 0
    (shown,) = data["games"]
    for i, mind in shown["minds"].items():
        for t, seen in enumerate(mind["ahead"]):
            if seen is None:
                assert shown["position"][t][i] < 0
                continue
            for j, cell in enumerate(shown["position"][t]):
                for counts in seen[j]:
                    assert sum(counts[1::2]) == 500 and sorted(counts[::2]) == counts[::2]
                if cell < 0:
                    assert all(counts == [CONFIG.num_cells, 500] for counts in seen[j]), "who has left stays away"
                    continue
                probs, share = mind["policy"][t] if i == j else mind["moa"][t][j], np.zeros(CONFIG.num_cells + 1)
                share[seen[j][0][::2]] = np.array(seen[j][0][1::2]) / 500
                if case == "discrete":
                    for action in range(4):
                        if target[cell][action] != cell:
                            compared += 1
                            expected = probs[action]
                            error = 5 * (expected * (1 - expected) / 500) ** 0.5 + 0.002
                            assert abs(share[target[cell][action]] - expected) < error, (i, j, t, action)
                else:
                    compared += 1
                    reachable = {cell, CONFIG.num_cells, *target[cell]}
                    assert set(np.flatnonzero(share)) <= reachable
    assert compared > 10


# ---------------------------------------------------------------------------------------------------------------------
# The goals, from the look-ahead


def beliefs(data):
    """(game, step, co-player, MOA's probabilities, the shares of its goal), of all learners"""
    for shown in data["games"]:
        for mind in shown["minds"].values():
            for t, about in enumerate(mind["moa"]):
                for seat, expected in enumerate(about or []):
                    if expected is not None:
                        yield shown, t, seat, expected, mind["goal"][t][seat]


def eager_hunters(args, networks, belief, clock, noise):
    """For predict_actions: who stands on prey hunts it, most likely; the others walk about"""
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 30.0, 30.0])
    probs = weight * belief.legal
    probs = probs / probs.sum(-1, keepdim=True)
    return probs.log().unflatten(1, (-1, CONFIG.num_players - 1))


def test_the_shares_are_those_of_the_samples(load, monkeypatch):
    """Each sample is watched here, step by step, and sorted by what each co-player hunts first"""
    run = load("partners")
    roll_forward = inspector.roll_forward
    rollouts = []

    def watched(run, state, start, samples):
        rollouts.append([])
        for imagined in roll_forward(run, state, start, samples):
            rollouts[-1].append(imagined)
            yield imagined

    monkeypatch.setattr(inspector, "roll_forward", watched)
    monkeypatch.setattr(run.script, "predict_actions", eager_hunters)
    data = inspector.inspect_run(run, None, games=1, places=1, steps_ahead=1, samples=8, seed=4)
    (shown,) = data["games"]
    mind = shown["minds"][1]
    present = [t for t, position in enumerate(shown["position"][:-1]) if position[1] >= 0]
    with_history, _ = rollouts  # and without
    assert 1 < len(with_history) <= data["goal"]["steps"] == 6
    compared = set()
    for row, t in enumerate(present):
        for k, seat in enumerate((2, 0)):  # after the learner in seat 1
            if shown["position"][t][seat] < 0:
                assert mind["goal"][t][seat] is None
                continue
            found = {"nothing": 0, "stag": 0, "hare": 0}
            for sample in range(8 * row, 8 * row + 8):
                first = "nothing"
                for ahead, imagined in enumerate(with_history):
                    there = imagined.board[0, sample, 1 + k] < CONFIG.num_cells
                    action = game.ACTION_NAMES[imagined.joint[0, sample, 1 + k]]
                    in_time = shown["time"][t] + ahead < CONFIG.final_time
                    if there and in_time and action.startswith("hunt") and first == "nothing":
                        first = action.removeprefix("hunt ")
                found[first] += 1
            compared |= {name for name, count in found.items() if count}
            assert mind["goal"][t][seat] == [count / 8 for count in found.values()], (t, seat)
    assert compared == {"nothing", "stag", "hare"}


def test_a_sample_ends_as_the_game_does():
    config = dataclasses.replace(CONFIG, steps_after_first_hunt=2)
    env = game.StagHuntEnv(config, num_envs=8)
    env.reset()
    time = torch.tensor([0, 1, 2, 3, 5, 6, 4, 4]).int()
    first_hunt = torch.tensor([-1, -1, 1, 1, -1, -1, 3, 2]).int()
    state = env.state._replace(time=time, first_hunt=first_hunt)
    over = inspector.game_over(config, time, first_hunt)
    assert torch.equal(over, env.game_over(state))
    assert over.int().tolist() == [0, 0, 0, 1, 0, 1, 0, 1]


def test_time_goes_on_as_the_models_are_rolled_forward(load, monkeypatch):
    run = load("discrete")
    clocks = {"evaluate_policy": [], "predict_actions": []}

    def watched(name, place):
        own = getattr(run.script, name)

        def watch(*given):
            clocks[name].append(given[place])
            return own(*given)

        return watch

    rollout = inspector.look_ahead

    def look_ahead(*given):
        monkeypatch.setattr(run.script, "evaluate_policy", watched("evaluate_policy", 3))
        monkeypatch.setattr(run.script, "predict_actions", watched("predict_actions", 3))
        return rollout(*given)

    monkeypatch.setattr(inspector, "look_ahead", look_ahead)
    inspector.inspect_run(run, None, games=1, places=1, steps_ahead=3, samples=2, seed=5)
    for seen in clocks.values():
        assert len(seen) == 3 and torch.equal(seen[0], (seen[0] * CONFIG.final_time).round() / CONFIG.final_time)
        for ahead, clock in enumerate(seen):
            torch.testing.assert_close(clock, seen[0] + ahead / CONFIG.final_time)


# ---------------------------------------------------------------------------------------------------------------------
# The command line and the file


def data_of(page: Path):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)[1])


def test_evaluate_writes_it_too(tmp_path, monkeypatch):
    path = checkpoint(tmp_path, hopplus_ppo, "ppo")
    monkeypatch.setattr(evaluate, "film", lambda run, state, path: None)
    for words in ([], ["--inspect"]):
        assert not list(tmp_path.glob("*.html"))
        evaluate.main(evaluate.parse_args([str(path), "--games", "2", "--device", "cpu", *words]))
    (page,) = tmp_path.glob("*.html")
    assert page.name == "inspect_learner-learner-learner.html" and len(data_of(page)["games"]) == 8


def test_the_file_stands_alone(look, tmp_path):
    data = {**look("hopplus"), "run": "</script><b>"}
    size = inspector.write_page(tmp_path / "page.html", data)
    text = (tmp_path / "page.html").read_text()
    assert size == len(text.encode()) and data_of(tmp_path / "page.html") == json.loads(json.dumps(data))
    assert text.count("</script>") == 2 and not re.search(r"https?://|src=|import |@import|fetch\(", text)
    assert max(map(len, inspector.TEMPLATE.read_text().splitlines())) <= 120


@pytest.mark.cuda
def test_on_a_gpu(tmp_path):
    for number, case in enumerate(("hopplus", "hop")):
        script, method, changes = CASES[case]
        (tmp_path / str(number)).mkdir()
        path = checkpoint(tmp_path / str(number), script, method, **changes)
        data = inspector.inspect_run(
            inspector.parse_args([str(path), "--device", "cuda"]).run, None, games=2, samples=4
        )
        assert len(data["games"]) == 2


# ---------------------------------------------------------------------------------------------------------------------
# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if chromium.find() is None:
        pytest.skip("no Chromium")
    browser = chromium.Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def texts(browser, selector):
    return browser.ask(f"[...document.querySelectorAll({selector!r})].map((element) => element.textContent.trim())")


def near(text, p):
    """Rounding of halves may differ"""
    return abs(float(text or 0) - 100 * p) <= (0.5001 if p > 0.0995 else 0.0501) and bool(text) == (p >= 0.0005)


def check_page(browser, data, game_number, t, player):
    """What the page shows of a step, against numbers of `data`"""
    shown, n = data["games"][game_number], len(data["seats"])
    mind = shown["minds"][player]
    assert browser.ask("location.hash") == f"#game={game_number + 1}&step={t}&player={player}"
    assert texts(browser, "#clock") == [f"step {t} of {data['final_time']}"]
    assert texts(browser, "#players .score") == [f"{score:.2f}" for score in shown["returns"][t]]
    assert texts(browser, "#players span:nth-child(2)") == shown["names"]
    present = [seat for seat in range(n) if shown["position"][t][seat] >= 0]
    assert texts(browser, "#board > text") == [str(seat) for seat in present]
    others = [seat for seat in range(n) if seat != player]
    assert (
        browser.ask("[...document.querySelectorAll('.co-player')].map((card) => Number(card.dataset.seat))") == others
    )
    playing = t < len(shown["actions"])
    if playing and mind["value"][t] is not None:
        assert abs(float(texts(browser, "#value")[0]) - mind["value"][t]) < 0.00501
        bars = texts(browser, "#own .filled")
        expected = [p for p in mind["policy"][t] if p >= 1e-5]
        assert len(bars) == len(expected) and all(map(near, bars, expected)), (bars, expected)
    for seat in others:
        card = f".co-player[data-seat='{seat}']"
        did = [game.ACTION_NAMES[shown["actions"][t][seat]]] if playing and seat in present else []
        assert texts(browser, f"{card} .did") == did
        about = mind["moa"][t][seat] if "moa" in mind and playing and mind["moa"][t] else None
        bars, expected = texts(browser, f"{card} .filled"), [p for p in about or [] if p >= 1e-5]
        assert len(bars) == len(expected) and all(map(near, bars, expected)), (seat, bars, expected)
        if about:
            surprise = -np.log(max(1e-5, about[shown["actions"][t][seat]]))
            assert abs(float(texts(browser, f"{card} .surprise")[0].split()[1]) - surprise) < 0.00501
            goal = texts(browser, f"{card} .goal b")
            assert [word.split()[0] for word in goal] == data["goal"]["names"]
            assert all(
                abs(float(word.split()[1]) - p) < 0.00501 for word, p in zip(goal, mind["goal"][t][seat], strict=True)
            )


def score_goals(data):
    """How often the largest share is what was hunted first in the next 6 steps; how often the most
    frequent outcome is"""
    truths = []
    right = []
    for shown, t, seat, _, shares in beliefs(data):
        hunts = [actions[seat] - 4 for actions in shown["actions"][t : t + 6] if actions[seat] > 4]
        truths.append([*hunts, 0][0])
        right.append(int(np.argmax(shares)) == truths[-1])
    return np.mean(right), max(np.bincount(truths)) / len(truths)


def came_true(data, shown, player, t, ahead):
    """The share of samples that put each player where it was then, for those still there at t"""
    found = []
    for seat, cell in enumerate(shown["position"][t]):
        if cell >= 0 and shown["minds"][player]["ahead"][t] and t + ahead < len(shown["position"]):
            then = shown["position"][t + ahead][seat]
            counts = shown["minds"][player]["ahead"][t][seat][ahead - 1]
            then = data["height"] * data["width"] if then < 0 else then
            found.append(dict(zip(counts[::2], counts[1::2], strict=True)).get(then, 0) / data["ahead"]["samples"])
    return found


@pytest.mark.browser
def test_a_browser_shows_it(browser, load, tmp_path):
    run = load("hopplus")
    data = inspector.inspect_run(run, None, games=3, places=2, steps_ahead=2, samples=8, seed=3)
    inspector.write_page(tmp_path / "page.html", data)
    browser.events.clear()
    browser.open(f"file://{tmp_path / 'page.html'}")
    right, most_frequent = score_goals(data)
    (legend,) = texts(browser, "#co-players small[class] [data-help='goal']")
    said = [float(number) for number in re.findall(r"([\d.]+) %", legend)]
    assert near(said[0], right) and near(said[1], most_frequent), (said, right, most_frequent)
    check_page(browser, data, 0, 0, 0)
    steps = len(data["games"][0]["actions"])
    for t in range(1, steps + 1):  # the whole game, by key
        browser.press("ArrowRight")
        check_page(browser, data, 0, t, 0)
    browser.press("ArrowRight")
    check_page(browser, data, 0, steps, 0)
    browser.press("Home")
    browser.press("2")
    check_page(browser, data, 0, 0, 2)
    for ahead in (1, 2):
        shares = [float(text.split()[0]) for text in texts(browser, ".came-true")]
        assert shares and all(map(near, shares, came_true(data, data["games"][0], 2, 0, ahead)))
        browser.press("]")
    everywhere = [
        share
        for shown in data["games"]
        for t in range(len(shown["actions"]))
        for share in came_true(data, shown, 2, t, 2)
    ]
    assert near(texts(browser, "#mean-share")[0].split()[2], np.mean(everywhere))
    browser.press("ArrowDown")
    check_page(browser, data, 1, 0, 2)
    browser.ask("location.hash = '#game=3&step=1&player=1'")
    browser.ask("new Promise((done) => setTimeout(done, 50))")
    check_page(browser, data, 2, 1, 1)
    browser.ask("document.querySelector('[data-head=\"0\"]').click()")
    check_page(browser, data, 2, 1, 0)
    found = [  # the most surprising step of player 0
        (mind[t][seat][shown["actions"][t][seat]], number, t, seat)
        for number, shown in enumerate(data["games"])
        for mind in [shown["minds"][0]["moa"]]
        for t in range(len(mind))
        for seat in range(3)
        if mind[t] and mind[t][seat]
    ]
    browser.press("s")
    check_page(browser, data, min(found)[1], min(found)[2], 0)
    assert len(texts(browser, "#surprises tbody tr")) == min(60, len(found))
    theme = browser.ask("document.documentElement.dataset.theme")
    browser.press("t")
    assert {theme, browser.ask("document.documentElement.dataset.theme")} == {"dark", "light"}
    browser.press("?")
    assert browser.ask("document.getElementById('keys').open")
    browser.press("?")
    assert browser.ask("document.documentElement.scrollWidth") <= 1366, "it must not scroll sideways"
    assert browser.named("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded") == []
    asked = {event["request"]["url"].split("#")[0] for event in browser.named("Network.requestWillBeSent")}
    assert {url for url in asked if not url.startswith("data:")} == {f"file://{tmp_path / 'page.html'}"}


@pytest.mark.browser
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("ppo", "no belief about goals: no model to roll forward|no model of the others' actions|without search"),
        ("search", "2 trees, 3 simulations each|depth"),
        ("partners", "MOA and the game's own rules|what it hunts first in the next 6 steps, share of samples (right: "),
        ("hop", "Bayes' rule|carries over stag"),
    ],
)
def test_every_kind_of_run_can_be_shown(case, said, browser, look, tmp_path):
    data = look(case)
    inspector.write_page(tmp_path / "page.html", data)
    browser.events.clear()
    last = max(number for number, shown in enumerate(data["games"]) if shown["place"] == 0)
    browser.open(f"file://{tmp_path / 'page.html'}#game={last + 1}&step=0")
    text = " ".join(browser.ask("document.body.innerText").split())
    assert all(words in text for words in said.split("|")), text
    if case == "search":
        player = next(iter(data["games"][last]["minds"]))
        mind = data["games"][last]["minds"][player]
        rows = browser.ask(
            "[...document.querySelectorAll('#search tr')].slice(1).map((row) => row.innerText.split('\\t'))"
        )
        legal = [a for a in range(7) if mind["policy"][0][a] > 0]
        assert [row[0] for row in rows] == [game.ACTION_NAMES[a] for a in legal]
        assert [float(row[2]) for row in rows] == [mind["visits"][0][a] for a in legal]
        assert all(abs(float(row[3]) - mind["q"][0][a]) < 0.00501 for row, a in zip(rows, legal, strict=True))
    for _ in range(2 * CONFIG.final_time):
        browser.press("ArrowRight")
    assert browser.named("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded") == []


def test_a_sample_keeps_the_subgoals_that_it_drew(load, monkeypatch):
    run = load("partners")
    predict, look_ahead, drawn = run.script.predict_actions, inspector.look_ahead, []

    def watched(*given):
        monkeypatch.setattr(run.script, "predict_actions", lambda *x: (drawn.append(x[4]), predict(*x))[1])
        found = look_ahead(*given)
        monkeypatch.setattr(run.script, "predict_actions", predict)
        return found

    monkeypatch.setattr(inspector, "look_ahead", watched)
    inspector.inspect_run(run, None, games=1, places=1, steps_ahead=3, samples=4, seed=4)
    first, second, third, *_ = drawn
    assert torch.equal(first, second) and torch.equal(first, third)
    assert len(first[0].unique(dim=0)) == first.shape[1], "each sample and co-player its own"


def test_goals_are_looked_for_as_long_as_it_takes_to_cross_the_board(tmp_path):
    config = dataclasses.replace(CONFIG, final_time=12)
    path = checkpoint(tmp_path, hopplus_ppo, "ppo-omg", **{**MIXED, "config": config})
    run = inspector.parse_args([str(path), "--device", "cpu"]).run
    data = inspector.inspect_run(run, None, games=1, places=1, steps_ahead=1, samples=2)
    assert data["goal"]["steps"] == 3 + 4
