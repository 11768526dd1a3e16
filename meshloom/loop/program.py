"""The program of a reinforcement-learning run once its roles are there: on one device, and over several.

Owns: putting the control on a stage where the run stands, and carrying it out. Refuses to know: devices, how roles are built.
Always holds: a run that goes on stands where it was saved before its first rollout.
"""

from meshloom.loop.control import ControlLoop
from meshloom.loop.groups import standing
from meshloom.loop.replay import dump_samples, saved_jobs, schedule_of
from meshloom.loop.rl import RLStage
from meshloom.loop.run_inputs import RunInputs
from meshloom.plan.build import Plan


def control_of(stage: RLStage, inputs: RunInputs, plan: Plan) -> ControlLoop:
    """The control of a run, where the run stands.

    Args:
        stage: that does the work; it is brought to where the run stands too.
        inputs: of the run.
        plan: of the run.
    """
    if inputs.saved is not None:
        stage.replay = saved_jobs(inputs.saved, inputs.settings, stage.session.display.notice)
    control = ControlLoop(schedule_of(inputs.settings, plan.steps), stage, inputs.order)
    if inputs.cut is not None:
        control.load(*standing(inputs.cut, inputs.settings))
        stage.load(inputs.cut)
    return control


def carry_out(control: ControlLoop, stage: RLStage, *, only_rollout: bool) -> int:
    """Train to the end, or generate and score the prompts of all steps; the exit code: 0 done, 130 stopped and saved."""
    steps = control.schedule.steps
    finished = dump_samples(stage, control.order, steps) if only_rollout else control.run()
    return stage.session.end(step=stage.step, stopped=not finished)
