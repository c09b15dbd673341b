"""evaluation/inspector.py: every number of the page is the script's, at its step, about its player."""

import dataclasses
import functools
import html
import json
import re
import shutil
import subprocess

import hopplus_mcts
import hopplus_ppo
import stag_hunt_env as game
from evaluation import inspector, runs
from stag_hunt_env import HUNT_STAG

import numpy as np
import pytest
import torch
from helpers import TINY_CONFIG as CONFIG
from helpers import untrained

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


def make_run(folder, script, method, **changes):
    """Learners that are not trained, but are sure of what they say -> Run, seats"""
    run = runs.load_run(str(untrained(folder, method, script, **changes)), None, "cpu")
    for network in run.networks.values():
        for name, p in network.items():
            if name.startswith(("head", "actor", "critic")) and name.endswith("weight"):
                p *= 30 if p.std() < 0.02 else 3
    return run, runs.seats_of(run, None)


@pytest.fixture(scope="module", autouse=True)
def less_work():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspector, "GOAL_DRAWS", 3)
        yield


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Name of a case -> Run, seats. Loaded anew each time: the inspector watches the script's functions"""

    def load(case: str):
        script, method, changes = CASES[case]
        return make_run(tmp_path_factory.mktemp("run"), script, method, **changes)

    return load


@pytest.fixture(scope="module")
def look(load):
    """Name of a case, number of samples -> what the page shows"""

    @functools.cache
    def look(case: str, samples: int = 2):
        return inspect(load(case), games=4, places=2, steps_ahead=1, samples=samples, seed=3)

    return look


def inspect(run_and_seats, **flags):
    return inspector.inspect_run(inspector.Args(device="cpu", **flags), *run_and_seats)


def close(shown, expected):
    assert (torch.as_tensor(shown) - torch.as_tensor(expected)).abs().max() < 1e-4, (shown, expected)


# ---- The same games, watched by this file
@torch.no_grad()
def watch(run, table, num_steps):
    """Plays as the inspector does. -> before each step the state, what was thought and then done"""
    script, steps = run.script, []
    sitting = [seat for seat, name in enumerate(table) if name == "learner"]
    numbers = [0 if run.args.share_parameters else m for m in range(len(sitting))]
    state = runs.seat_learners(run, [table], numbers, num_envs=2, num_steps=1, seed=3)
    games, env = state.games, state.env
    taken, probs, plans = [], [], []
    advance, act, plan = env.advance, games.seats.action_probs, getattr(script, "plan_actions", None)
    env.advance = lambda actions: taken.append(actions.clone()) or advance(actions)
    games.seats.action_probs = lambda *given: probs.append(act(*given)) or probs[-1]
    if plan is not None:
        script.plan_actions = lambda *given: plans.append(plan(*given)) or plans[-1]
    for _ in range(num_steps):
        before = game.State(*(x.clone() for x in env.state))
        situation = {
            "board": games.seats.to_learners(games.boards(before)),
            "clock": games.seats.per_learner(before.time / CONFIG.final_time),
            "last_joint": games.last_joint.clone(),
            "first_hunt": games.seats.per_learner(before.first_hunt),
            "history": games.history.clone(),
        }
        mind = script.decide(state, script.perceive(state, situation))
        thought = {"state": before, "returns": env.episode_return.clone(), "mind": mind}
        if "posterior" in mind:
            with torch.random.fork_rng():
                thought["moa"] = moa_of(script, state, mind)
        script.rollout(state, games)
        done = {"actions": taken[-1], "probs": probs[-1], "plan": plans[-1] if plans else None}
        steps.append(thought | done)
    if plan is not None:
        script.plan_actions = plan
    return sitting, steps


def moa_of(script, state, mind):
    """[M, n, K, 7] MOA averaged over subgoals"""
    args, posterior = state.args, mind["posterior"]
    shape = mind["history"].shape[:3]
    if args.goal_kind == "discrete":
        found = 0
        for k in range(args.goal_dim):
            noise = torch.zeros(*posterior.shape[:2], args.goal_dim)
            noise[..., k] = 1e4
            found += posterior.softmax(-1)[..., k].view(*shape, 1) * script.predict_actions(state, mind, noise)
        return found
    torch.manual_seed(0)
    draws = torch.randn(1, inspector.GOAL_DRAWS, args.goal_dim)[0]
    said = [script.predict_actions(state, mind, draw.expand(*posterior.shape[:2], -1)) for draw in draws]
    return torch.stack(said).mean(0)


def by_step(data):
    """(game, number of the step in its place, step of the game), in the order of the page"""
    played = [0, 0]
    for shown in data["games"]:
        for t in range(len(shown["actions"])):
            yield shown, played[shown["place"]], t
            played[shown["place"]] += 1


@pytest.mark.parametrize("case", [case for case in CASES if case != "new partners"])
def test_the_numbers_are_the_script_s(case, load, look):
    run, table = load(case)
    data = look(case)
    sitting, steps = watch(run, table, 1 + max(number for _, number, _ in by_step(data)))
    compared, n = 0, CONFIG.num_players
    for shown, number, t in by_step(data):
        step, place = steps[number], shown["place"]
        state, mind = step["state"], step["mind"]
        cells = torch.where(state.present[place], state.position[place], -1).tolist()
        assert shown["time"][t] == state.time[place] == t
        assert shown["position"][t] == cells and shown["prey"] == state.prey_position[place].tolist()
        assert shown["alive"][t] == state.prey_alive[place].int().tolist()
        assert shown["actions"][t] == step["actions"][place].tolist()
        close(shown["returns"][t], step["returns"][place])
        for i, kind in enumerate(shown["names"]):
            if kind != "learner":
                close(shown["probs"][t][i], step["probs"][place, i])
            left = cells[i] >= 0 > shown["position"][t + 1][i]
            prey = "stag" if shown["actions"][t][i] == HUNT_STAG else "hare"
            assert left == (shown["taken"][i] == {"step": t, "prey": prey})
        for i, own in shown["minds"].items():
            row = sitting.index(i), place
            if cells[i] < 0:
                assert own["value"][t] is None and own["policy"][t] is None
                continue
            close(own["value"][t], mind["value"][row])
            close(own["policy"][t], mind["log_probs"][row].exp())
            played = mind["log_probs"][row].exp()
            if step["plan"] is not None:
                plan, tree = step["plan"]
                shape = len(sitting), 2, run.args.num_trees
                visits, returns = (x[:, :, 0].reshape(*shape, 7)[row] for x in (tree.visits, tree.returns))
                close(own["visits"][t], visits.sum(0))
                tried = visits.amin(0) > 0
                close(torch.tensor(own["q"][t])[tried], (returns / visits).mean(0)[tried])
                figures = [plan[f"search/{name}"][row] for name in ("gain", "kl", "depth")]
                close(own["search"][t], torch.stack(figures))
                played = plan["played"][row]
                close(own["played"][t], played)
            close(shown["probs"][t][i], played)
            assert "moa" not in own or own["moa"][t][i] is None
            for k, j in enumerate((i + 1 + k) % n for k in range(n - 1)):
                if cells[j] < 0:
                    assert "moa" not in own or own["moa"][t][j] is None
                    continue
                compared += 1
                if "moa" in step:
                    close(own["moa"][t][j], step["moa"][(*row, k)])
                    posterior = mind["posterior"].unflatten(1, (-1, n - 1))[(*row, k)]
                    kept = mind["history"][(*row, k)]
                    close(own["memory"][t][j], 0.5 + kept[2:] if case == "hop" else kept[[run.args.subgoal_hidden]])
                if run.args.goal_kind == "discrete":
                    close(own["goal"][t][j], posterior.softmax(0))
    assert compared > 20
    for name in ("moa", "goal", "ahead"):
        assert (name in data["games"][0]["minds"][sitting[0]]) == (case != "ppo"), name
    assert (data["goal"] is None) == (data["ahead"] is None) == (case == "ppo")


def test_what_is_carried_over(look):
    """In the first game nothing; in the second the steps in which the co-player was seen, discounted"""
    data = look("partners", 64)
    assert data["carried"] == 0.9
    for place in (0, 1):
        first, second = (shown for shown in data["games"] if shown["place"] == place)
        mind = first["minds"][1]
        assert mind["goal"] == mind["without"]
        assert all(about in (None, [0]) for step in mind["memory"] if step for about in step)
        mind = second["minds"][1]
        for j in (0, 2):
            seen = sum(position[j] >= 0 for position in first["position"][:-1])
            close(mind["memory"][0][j], [0.9 * seen])
            assert mind["goal"][0][j] != mind["without"][0][j]
    assert look("new partners")["carried"] == 0


# ---- The next steps
def test_one_step_ahead_is_what_moa_expects(load):
    """By the game's rules: where MOA sends the co-players, and the policy oneself"""
    data = inspect(load("discrete"), games=1, places=1, steps_ahead=2, samples=500, seed=5)
    assert data["ahead"]["model"] == "the game's own rules"
    target = game.StagHuntEnv(CONFIG).target.tolist()
    compared = 0
    (shown,) = data["games"]
    for i, mind in shown["minds"].items():
        for t, seen in enumerate(mind["ahead"]):
            if seen is None:
                assert shown["position"][t][i] < 0
                continue
            for j, cell in enumerate(shown["position"][t]):
                assert all(sum(counts[1::2]) == 500 and sorted(counts[::2]) == counts[::2] for counts in seen[j])
                if cell < 0:
                    assert all(counts == [CONFIG.num_cells, 500] for counts in seen[j]), "who has left stays away"
                    continue
                probs, share = mind["policy"][t] if i == j else mind["moa"][t][j], np.zeros(CONFIG.num_cells + 1)
                share[seen[j][0][::2]] = np.array(seen[j][0][1::2]) / 500
                for action in [action for action in range(4) if target[cell][action] != cell]:
                    error = 5 * (probs[action] * (1 - probs[action]) / 500) ** 0.5 + 0.002
                    assert abs(share[target[cell][action]] - probs[action]) < error, (i, j, t, action)
                compared += 1
    assert compared > 10


def eager_hunters(state, mind, noise):
    """For predict_actions: who stands on prey hunts it, most likely; the others walk about"""
    probs = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 30.0, 30.0]) * mind["others_legal"]
    return (probs / probs.sum(-1, keepdim=True)).unflatten(1, mind["history"].shape[1:3])


def test_the_shares_are_those_of_the_samples(load, monkeypatch):
    """Each sample is watched here, step by step, and sorted by what each co-player hunts first"""
    run, table = load("partners")
    roll_forward = inspector.roll_forward
    rollouts = []

    def watched(*given):
        rollouts.append([])
        for step in roll_forward(*given):
            rollouts[-1].append(step)
            yield step

    monkeypatch.setattr(inspector, "roll_forward", watched)
    monkeypatch.setattr(run.script, "predict_actions", eager_hunters)
    data = inspect((run, table), games=1, places=1, steps_ahead=1, samples=8, seed=4)
    (shown,) = data["games"]
    mind = shown["minds"][1]
    with_history, _ = rollouts  # and without
    assert len(with_history) == data["goal"]["steps"] == 6
    compared = set()
    for t in range(len(shown["actions"])):
        for k, seat in enumerate((2, 0)):  # after the learner in seat 1
            if shown["position"][t][1] < 0 or shown["position"][t][seat] < 0:
                assert mind["goal"][t] is None or mind["goal"][t][seat] is None
                continue
            found = {"nothing": 0, "stag": 0, "hare": 0}
            for sample in range(8 * t, 8 * t + 8):
                first = "nothing"
                for ahead, (situation, joint, _) in enumerate(with_history):
                    there = situation["board"][0, sample, 1 + k] < CONFIG.num_cells
                    action = game.ACTION_NAMES[joint[0, sample, 1 + k]]
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
    time = torch.tensor([0, 1, 2, 3, 5, 6, 4, 4]).int()
    first_hunt = torch.tensor([-1, -1, 1, 1, -1, -1, 3, 2]).int()
    state = env.state._replace(time=time, first_hunt=first_hunt)
    over = inspector.game_over(config, {"clock": env.clock(state)[None], "first_hunt": first_hunt[None]})
    assert torch.equal(over[0], env.game_over(state))
    assert over[0].int().tolist() == [0, 0, 0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("case", ["partners", "hopplus"])
def test_as_models_are_rolled_forward_time_goes_on_and_subgoals_stay(case, load):
    run, table = load(case)
    numbers = [runs.learner_number(run, 0, seat) for seat, name in enumerate(table) if name == "learner"]
    state = runs.seat_learners(run, [table], numbers, num_envs=2, num_steps=1, seed=3)
    start = {name: x.repeat_interleave(2, 1) for name, x in inspector.situation_of(state).items()}
    drawn, clocks = [], []
    predict = run.script.predict_actions

    def watched(state, mind, noise):
        drawn.append((mind["posterior"], noise))
        clocks.append(mind["clock"])
        return predict(state, mind, noise)

    run.script.predict_actions = watched
    with torch.no_grad():
        list(inspector.roll_forward(run, state, start, 4, 3))
    for ahead, clock in enumerate(clocks):
        torch.testing.assert_close(clock, torch.full_like(clock, ahead / CONFIG.final_time))
    assert all(torch.equal(x, y) for now in drawn for x, y in zip(now, drawn[0], strict=True))
    noise = drawn[0][1][0]
    assert len(noise.unique(dim=0)) == len(noise), "each sample and co-player its own"


# ---- The file
def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)[1])


def test_the_file_stands_alone(look, tmp_path):
    data = {**look("hopplus"), "run": "</script><b>"}
    inspector.write_page(tmp_path / "page.html", data)
    text = (tmp_path / "page.html").read_text()
    assert data_of(tmp_path / "page.html") == json.loads(json.dumps(data))
    assert text.count("</script>") == 2 and not re.search(r"https?://|src=|import |@import|fetch\(", text)


def test_the_command_writes_it(load, tmp_path, capsys):
    run, _ = load("ppo")
    inspector.main(inspector.Args(run=str(run.folder), device="cpu", games=3, seats="learner,waiting,random"))
    (page,) = run.folder.glob("*.html")
    assert page.name == "inspect_learner-waiting-random.html" and f"wrote {page}" in capsys.readouterr().out
    assert [shown["place"] for shown in data_of(page)["games"]] == [0, 0, 1]


@pytest.mark.cuda
def test_on_a_gpu(tmp_path):
    for case in ("hopplus", "hop"):
        script, method, changes = CASES[case]
        run, table = make_run(tmp_path / case, script, method, **changes)
        run = runs.load_run(str(run.folder), None, "cuda")
        data = inspector.inspect_run(inspector.Args(device="cuda", games=2, samples=4), run, table)
        assert len(data["games"]) == 2


# ---- In a browser
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
WATCH = """<script>
(async () => {
  const seen = [];
  const errors = [];
  window.addEventListener("error", (event) => errors.push(event.message));
  for (const move of MOVES) {
    if (move.startsWith("#")) {
      location.hash = move;
      await new Promise((done) => setTimeout(done, 50));
    } else if (move.startsWith("[data")) {
      document.querySelector(move).click();
    } else {
      document.body.dispatchEvent(new KeyboardEvent("keydown", {key: move, bubbles: true}));
    }
    const found = {hash: location.hash, text: document.body.innerText, width: document.documentElement.scrollWidth};
    for (const selector of SELECTORS) {
      found[selector] = [...document.querySelectorAll(selector)].map((element) => element.textContent.trim());
    }
    seen.push(found);
  }
  document.body.innerHTML = `<pre id="seen"></pre>`;
  document.getElementById("seen").textContent = JSON.stringify([seen, errors]);
})();
</script>"""
CARD = ".co-player[data-seat='{}'] {}"
SELECTORS = ["#clock", "#players .score", "#board > text", "#value", "#own .filled", "#search td"]
PARTS = (".did", ".filled", ".surprise", ".goal b")
SELECTORS += [CARD.format(seat, part) for seat in range(3) for part in PARTS]


def browse(folder, data, moves):
    """After each of these keys, clicks and addresses: what the page shows"""
    inspector.write_page(folder / "page.html", data)
    script = WATCH.replace("MOVES", json.dumps(moves)).replace("SELECTORS", json.dumps(SELECTORS))
    text = (folder / "page.html").read_text()
    (folder / "watched.html").write_text(text.replace("</body>", script + "</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1366,768", "--dump-dom"]
    command += ["--virtual-time-budget=60000", f"--user-data-dir={folder / 'profile'}", str(folder / "watched.html")]
    page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    seen, errors = json.loads(html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', page, re.S)[1]))
    assert not errors
    assert max(found["width"] for found in seen) <= 1366, "it must not scroll sideways"
    return seen


def near(text, p):
    """Rounding of halves may differ"""
    return abs(float(text or 0) - 100 * p) <= (0.5001 if p > 0.0995 else 0.0501) and bool(text) == (p >= 0.0005)


def assert_bars(bars, expected):
    expected = [p for p in expected if p >= 1e-5]
    assert len(bars) == len(expected) and all(map(near, bars, expected)), (bars, expected)


def check_page(found, data, game_number, t, player):
    """What the page shows of a step, against numbers of `data`"""
    shown = data["games"][game_number]
    mind = shown["minds"][player]
    assert found["hash"] == f"#game={game_number + 1}&step={t}&player={player}"
    assert found["#clock"] == [f"step {t} of {data['final_time']}"]
    assert found["#players .score"] == [f"{score:.2f}" for score in shown["returns"][t]]
    present = [seat for seat in range(3) if shown["position"][t][seat] >= 0]
    assert found["#board > text"] == [str(seat) for seat in present]
    playing = t < len(shown["actions"])
    if playing and mind["value"][t] is not None:
        assert abs(float(found["#value"][0]) - mind["value"][t]) < 0.00501
        assert_bars(found["#own .filled"], mind["policy"][t])
    for seat in {0, 1, 2} - {player}:
        did, bars, surprise, goal = (found[CARD.format(seat, part)] for part in PARTS)
        acts = playing and seat in present
        assert did == ([game.ACTION_NAMES[shown["actions"][t][seat]]] if acts else [])
        about = mind["moa"][t][seat] if playing and mind["moa"][t] else None
        assert_bars(bars, about or [])
        if about:
            nats = -np.log(max(1e-5, about[shown["actions"][t][seat]]))
            assert abs(float(surprise[0].split()[1]) - nats) < 0.00501
            assert [words.split()[0] for words in goal] == data["goal"]["names"]
            shares = [float(words.split()[1]) for words in goal]
            assert np.abs(np.subtract(shares, mind["goal"][t][seat])).max() < 0.00501


@in_a_browser
def test_a_browser_shows_it(load, tmp_path):
    """A whole game by key; other games and players by key, address and click"""
    data = inspect(load("hopplus"), games=3, places=2, steps_ahead=2, samples=8, seed=3)
    steps = len(data["games"][0]["actions"])
    surprising = [
        (about[seat][shown["actions"][t][seat]], number, t)
        for number, shown in enumerate(data["games"])
        for t, about in enumerate(shown["minds"][0]["moa"])
        for seat in range(3)
        if about and about[seat]
    ]
    expected = [("ArrowRight", 0, t, 0) for t in range(1, steps + 1)]
    expected += [("Home", 0, 0, 0), ("2", 0, 0, 2), ("#game=3&step=1&player=1", 2, 1, 1), ('[data-head="0"]', 2, 1, 0)]
    expected += [("s", *min(surprising)[1:], 0)]
    seen = browse(tmp_path, data, [*(move for move, *_ in expected), "?"])
    for found, (_, *place) in zip(seen, expected, strict=False):
        check_page(found, data, *place)
    assert "heat map" in seen[-1]["text"], "the help"


PANELS = {"own": "Its policy", "search": "Search", "surprises": "Surprises", "ahead": "Where it expects"}


@in_a_browser
@pytest.mark.parametrize(
    ("case", "panels", "said"),
    [
        ("ppo", {"own"}, "Left: next action"),
        ("search", set(PANELS), "2 trees, 3 simulations each|depth"),
        ("partners", {"own", "surprises", "ahead"}, "MOA and the game's own rules|first in the next 6 steps"),
        ("hop", set(PANELS), "Bayes' rule|carries over stag"),
    ],
)
def test_every_kind_of_run_shows_what_it_has(case, panels, said, look, tmp_path):
    data = look(case)
    last = max(number for number, shown in enumerate(data["games"]) if shown["place"] == 0)
    player = next(iter(data["games"][last]["minds"]))
    moves = [f"#game={last + 1}&step=0&player={player}", *["ArrowRight"] * CONFIG.final_time]
    found, *_ = browse(tmp_path, data, moves)
    text = " ".join(found["text"].split())
    assert all(words in text for words in said.split("|")), text
    assert {name for name, title in PANELS.items() if title in text} == panels, "an empty one is not shown"
    if case == "search":
        mind = data["games"][last]["minds"][player]
        legal = [a for a in range(7) if mind["policy"][0][a] > 0]
        cells = found["#search td"]
        assert cells[::5] == [game.ACTION_NAMES[a] for a in legal]
        assert [float(x) for x in cells[2::5]] == [mind["visits"][0][a] for a in legal]
        assert all(abs(float(x) - mind["q"][0][a]) < 0.00501 for x, a in zip(cells[3::5], legal, strict=True))
