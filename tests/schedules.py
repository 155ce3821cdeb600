"""Random valid pipeline schedules."""

from stepgauge.spec.plan.pipeline import Action, Schedule


def random_schedule(source, *, ranks, stages, micro_batches):
    """Returns a schedule with a random placement of stages and a random order that can run."""
    owners = list(range(ranks)) + [source.randrange(ranks) for _ in range(stages - ranks)]
    source.shuffle(owners)
    rows, done = [[] for _ in range(ranks)], set()
    waiting = [
        Action(stage, kind, k)
        for stage in range(stages)
        for k in range(micro_batches)
        for kind in ("F", *source.choice(("IW", "B")))
    ]
    while waiting:
        action = source.choice([action for action in waiting if _can_run(action, done, stages)])
        waiting.remove(action)
        done.add(action)
        rows[owners[action.stage]].append(action)
    return Schedule(tuple(map(tuple, rows)))


def _can_run(action, done, stages):
    stage, kind, k = action
    if kind == "F":
        return stage == 0 or Action(stage - 1, "F", k) in done
    if kind == "W":
        return Action(stage, "I", k) in done
    after = {Action(stage + 1, other, k) for other in "BI"}
    return Action(stage, "F", k) in done and (stage == stages - 1 or bool(after & done))
