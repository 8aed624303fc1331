"""The generator actor: assembles the parts that `loop.py` runs; on SIGUSR1 it asks to leave and ends at Stop."""

from functools import partial
from typing import Any

from actors.engines.protocol import MEMBERS, Engine
from actors.generator.delivery import Delivery
from actors.generator.loop import Generator, LoopRules
from actors.generator.rollout_runner import RolloutLog, RolloutRunner
from actors.generator.weight_updates import WeightUpdates
from actors.models.loading import load_tokenizer
from actors.runtime import process
from actors.runtime.context import Context, HeartbeatState, journal_rejections, open_bus
from actors.runtime.head_session import ActorRuntime, HeadSession, run_until_stop
from actors.runtime.torch_profiler import TorchProfiler
from actors.runtime.user_code import load_function
from actors.runtime.user_failures import Failures, Prints
from actors.workflows.loading import close_workflow, continues, load_workflow
from areal_bus.config.capacity import capacity, slots, together
from areal_bus.config.names.engines import kind_of
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.messages import Ready
from areal_bus.storage.journal import Journal
from areal_bus.transport.bus import Bus
from areal_bus.weights.process_group import print_numeric_peers
from areal_bus.weights.receiver import WeightReceiver
from areal_bus.weights.snapshot import forms_of

RESEND_S = 120.0  # a trajectory without acknowledgement is sent again, to another reward actor if there is one


def run(context: Context) -> None:
    """Sample until the head sends Stop. Raises ConfigError when model, tokenizer or workflow do not load."""
    print_numeric_peers()
    config = context.config()
    journal = context.journal(config)
    heartbeat = HeartbeatState()
    bus = open_bus(context, config, heartbeat)
    run_until_stop(journal, bus, lambda: sample_until_stop(context, config, journal, heartbeat, bus))


def sample_until_stop(context: Context, config: Config, journal: Journal, heartbeat: HeartbeatState, bus: Bus) -> str:
    """Load, send Ready and run the loop until Stop. Returns the reason of the Stop."""
    session = HeadSession(bus, silent_s=config.bus.silent_s)
    session.join(context)
    journal.mark("load")
    heartbeat.note = f"loads {context.model_folder}"
    tokenizer = load_tokenizer(context.model_folder, date=context.run_date())
    logs, what = context.folder / "logs", f"workflow.function {config.workflow.function!r}"
    workflow = load_workflow(config, wake=bus.wake, prints=Prints(logs, context.name, what))
    engine = make_engine(context, config, tokenizer)
    runner = RolloutRunner(
        engine,
        workflow,
        tokenizer,
        config,
        RolloutLog(context.name, journal, Failures(logs, context.name, what, ends=context.incarnation == 0)),
    )
    weight_updates = WeightUpdates(partial(make_member, context, config), forms_of(engine.parameters()), bus.wake)
    delivery = Delivery(RESEND_S, gather=together(config))
    reports = config.rollout.max_head_offpolicyness > 0 and continues(workflow)
    generator = Generator(
        ActorRuntime(bus, session, journal, heartbeat),
        engine,
        runner,
        weight_updates,
        delivery,
        LoopRules(
            n_slots=slots(config),
            report_tokens=config.rollout.report_tokens if reports else 0,
            drains=config.rollout.on_update == "drain",
            holds_versions=config.rollout.on_update == "finish_old",
        ),
    )
    profiler = TorchProfiler(context.name, context.folder, config.profile, journal, bounds_s=True)
    session.send(Ready(capacity=capacity(config)))
    try:
        while generator.stopped is None:
            if process.drain_requested():
                if session.is_alone:
                    return "asked to leave, with no head there"
                generator.leave()
            if context.is_guest:
                session.give_up_after(config.launch.timeout_s, context.head)
            profiler.turn(engine.version or 0)
            generator.turn()
            journal_rejections(bus, journal)
    finally:
        profiler.close((engine.version or 0) + 1)
        weight_updates.close()
        engine.close()
        close_workflow(workflow)
    return generator.stopped


def make_member(context: Context, config: Config) -> WeightReceiver:
    """The weight receiver. Weights for an inference server are received in host memory and handed on when verified."""
    on_device = kind_of(config.rollout.engine).on_device
    return WeightReceiver(
        context.name,
        address=context.address,
        interface=context.interface,
        device=context.device if on_device else "cpu",
        staging=config.weights.staging if on_device else "host",
    )


def make_engine(context: Context, config: Config, tokenizer: Any) -> Engine:
    """The engine without weights, or without adapters: they arrive with the first push. Raises ConfigError."""
    opener = kind_of(config.rollout.engine).opener  # imported only when configured: dependencies are optional
    engine: Engine = load_function("rollout.engine", opener)(context, config, tokenizer)
    if missing := [name for name in MEMBERS if not hasattr(engine, name)]:
        raise ConfigError(
            f"methods missing in the engine of {opener!r}: {', '.join(missing)}; see actors/engines/protocol.py"
        )
    return engine
