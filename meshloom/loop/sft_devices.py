"""``meshloom sft`` over several devices: the program of ``loop.sft`` on a model that is on workers.

Owns: starting the workers and giving the model its ranks. Refuses to know: the loss, the order of a run (``loop.sft``), how
processes are started (``fabric``). Always holds: everything that can be wrong with the input is found before the run folder is
touched; a run goes on from a checkpoint of any number of devices.
"""

from contextlib import ExitStack

import torch

from meshloom.config.settings import SftSettings
from meshloom.data.order import PromptOrder
from meshloom.data.tokenizer import load_tokenizer, require_tokens
from meshloom.fabric.dispatch import GroupLayout
from meshloom.fabric.groups import WorkerGroup
from meshloom.fabric.workers import Workers
from meshloom.loop.begun import takes_up
from meshloom.loop.build import find_checkpoint, finish_plan, open_run
from meshloom.loop.facts import least_free_bytes
from meshloom.loop.many_devices import ASK_S, BUILD_S, DATA_AXES
from meshloom.loop.model_role import RemoteModel, RoleRanks
from meshloom.loop.remote import RankMemory, RemoteResidents, RemoteSnapshot, snapshot_of
from meshloom.loop.run_workers import start_workers, stopping_at_once
from meshloom.loop.session import read_cut
from meshloom.loop.sft import SftProgram, is_streaming
from meshloom.loop.sft_data import load_examples
from meshloom.loop.sft_host import SftHost
from meshloom.loop.sharing import sharing_of
from meshloom.observe.loggers import check_loggers
from meshloom.observe.run_folder import check_free
from meshloom.plan.build import build_plan
from meshloom.plan.layout import Layout
from meshloom.plan.placement import Role
from meshloom.train.load import check_model_folder

_HOST = "meshloom.loop.sft_host:SftHost"


def run_sft_over_devices(settings: SftSettings, layout: Layout, *, resume: bool) -> int:
    """Fine-tune; the exit code: 0 done, 130 stopped and saved.

    Args:
        settings: of the run.
        layout: of its model.
        resume: go on from the newest checkpoint.

    Raises:
        UserError: if the input is bad; nothing has been written then.
        WorkerFault: if a worker fails; the run goes on from its newest checkpoint.
        RunFault: if the run stops itself.
    """
    resume = takes_up(settings, resume=resume)
    check_model_folder(settings.model.path)
    check_free(settings.run_dir, resume=resume)
    check_loggers(settings.logging.loggers)
    checkpoint, settings = find_checkpoint(settings) if resume else (None, settings)
    cut = None if checkpoint is None else read_cut(checkpoint)
    tokenizer = load_tokenizer(settings.model.path)
    data = load_examples(settings, tokenizer)
    build_plan(settings, len(data.examples)).require()
    order = PromptOrder(len(data.examples), settings.seed, settings.data.shuffle)
    if cut is not None:
        order.load(cut.values["order"])
    with ExitStack() as resources:
        workers = resources.enter_context(start_workers(settings, layout, _HOST))
        told = workers.call("device_facts", phase="start", deadline_s=ASK_S)
        plan, settings = finish_plan(settings, len(data.examples), least_free_bytes(told))
        updates = 0 if cut is None else cut.values["step"]
        where = None if checkpoint is None else checkpoint.absolute()
        arguments = {"settings": settings, "layout": layout, "checkpoint": where, "updates": updates}
        workers.call("build", arguments, phase="start", deadline_s=BUILD_S)
        model = _model(settings, layout, workers)
        facts = model.group.call("facts", {"role": Role.ACTOR}, phase="start", deadline_s=ASK_S)
        require_tokens(max(each.vocabulary for each in facts), data.ids)
        described, size = told[0].described, sum(each.checkpoint_bytes for each in facts)
        session = resources.enter_context(open_run(settings, plan, size, described, resume=resume, cut=cut))
        resources.enter_context(stopping_at_once(workers, session))
        for notice in data.notices():
            session.display.notice(notice)
        session.measure_memory = RankMemory(workers, [seat.rank for seat in workers.seats], {}).metrics
        residents = RemoteResidents(model.group, session.folder.log_memory) if is_streaming(settings) else None
        program = _RankProgram(
            settings, session, model, data, order, tokenizer, plan.updates, step=updates, residents=residents
        )
        torch.manual_seed(settings.seed)
        code = program.run()
        workers.ends_with(code)
        return code


def _model(settings: SftSettings, layout: Layout, workers: Workers) -> RemoteModel:
    found = layout.role(Role.ACTOR)
    ranks = GroupLayout.of_mesh(found.ranks, found.mesh.axes, DATA_AXES)
    return RemoteModel(RoleRanks(WorkerGroup(workers, ranks, SftHost), sharing_of(settings, found, backward=True)))


class _RankProgram(SftProgram):
    """Of a model that is on ranks."""

    model: RemoteModel

    def snapshot(self) -> RemoteSnapshot:
        return snapshot_of(self.model.group, self.tokenizer)
