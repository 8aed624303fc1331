"""The generator actor: consumes prompts, versions and weights; waits for a prompt or a free slot; unblocked by the head
(gate open); produces trajectories.

Here it is put together; `actors.generator.loop` is what it does. SIGUSR1 asks it to leave: it says so, ends what it
has, and the head says Stop; where no head is heard it just ends.
"""

from functools import partial
from typing import Any

from actors.engines.builtin.engine import AHEAD_S, BuiltinEngine
from actors.engines.protocol import Engine
from actors.generator.delivery import Delivery
from actors.generator.loop import Generator
from actors.generator.rollout_runner import RolloutRunner
from actors.generator.weight_updates import WeightUpdates
from actors.models.loading import empty_model, load_tokenizer, stop_ids
from actors.runtime import process as draining
from actors.runtime.context import Context, HeartbeatState, note_refusals, open_bus
from actors.runtime.head_session import HEAD, HeadSession
from actors.runtime.user_failures import Failures, Prints
from actors.workflows.loading import close_workflow, continues, load_workflow
from areal_bus.config.capacity import capacity, slots, together
from areal_bus.config.sections import Config
from areal_bus.core.events import Event
from areal_bus.journal import Journal
from areal_bus.messages import Failure, Ready
from areal_bus.transport.bus import Bus
from areal_bus.weights.receiver import WeightReceiver
from areal_bus.weights.snapshot import forms_of


def run(context: Context) -> None:
    """Sample until the head says Stop. Raises ConfigError when model, tokenizer or workflow do not load."""
    config = context.config()
    journal = context.journal(config)
    pulse = HeartbeatState()
    bus = open_bus(context, config, pulse)
    try:
        reason = sample_until_stop(context, config, journal, pulse, bus)
    except Exception as error:
        journal.write(Event.FAILED, error=f"{type(error).__name__}: {error}")
        bus.send(HEAD, Failure(error=f"{type(error).__name__}: {error}"))
        raise
    else:
        journal.close(reason=reason)
    finally:
        bus.close()


def sample_until_stop(context: Context, config: Config, journal: Journal, pulse: HeartbeatState, bus: Bus) -> str:
    """Load, say Ready, and turn until Stop: its reason."""
    presence = HeadSession(bus, silent_s=config.bus.silent_s)
    presence.join(context)
    journal.mark("load")
    pulse.note = f"loads {context.model_folder}"
    tokenizer = load_tokenizer(context.model_folder)
    logs, what = context.folder / "logs", f"workflow.function {config.workflow.function!r}"
    workflow = load_workflow(config, wake=bus.wake, prints=Prints(logs, context.name, what))
    engine = make_engine(context, config, tokenizer)
    sampling = RolloutRunner(
        engine,
        workflow,
        tokenizer,
        config,
        name=context.name,
        journal=journal,
        failures=Failures(logs, context.name, what, ends=context.incarnation == 0),
    )
    receiving = WeightUpdates(partial(make_member, context, config), forms_of(engine.parameters()), bus.wake)
    delivery = Delivery(config.bus.resend_s, gather=together(config))
    reports = config.rollout.max_head_offpolicyness > 0 and continues(workflow)
    generator = Generator(
        bus,
        presence,
        engine,
        sampling,
        receiving,
        delivery,
        journal,
        pulse,
        n_slots=slots(config),
        report_tokens=config.rollout.report_tokens if reports else 0,
        drains=config.rollout.on_update == "drain",
    )
    presence.say(Ready(capacity=capacity(config)))
    try:
        while generator.stopped is None:
            if draining.asked():
                if presence.is_alone:
                    return "asked to leave, with no head there"
                generator.leave()
            if context.is_guest:
                presence.give_up_after(config.launch.timeout_s, context.head)
            generator.turn()
            note_refusals(bus, journal)
    finally:
        receiving.close()
        engine.close()
        close_workflow(workflow)
    return generator.stopped


def make_member(context: Context, config: Config) -> WeightReceiver:
    """This generator in pushes. What is for a server comes down in host memory, and goes on when it is verified."""
    computes = config.rollout.engine == "builtin"
    return WeightReceiver(
        context.name,
        address=context.address,
        interface=context.interface,
        device=context.device if computes else "cpu",
        staging=config.weights.staging if computes else "host",
    )


def make_engine(context: Context, config: Config, tokenizer: Any) -> Engine:
    """The engine without weights: all of them come by push."""
    if config.rollout.engine == "simulated":
        from actors.engines.simulated.connect import open_simulated  # optional: few jobs make their tokens up

        return open_simulated(context, config, tokenizer)
    if config.rollout.engine != "builtin":
        from actors.engines.servers.connect import open_engine  # optional: what it needs may not be installed

        return open_engine(context, config, tokenizer)
    model = empty_model(context.model_folder, config.model.dtype, context.device)
    return BuiltinEngine(
        model,
        stop_ids=stop_ids(model, tokenizer),
        n_slots=config.rollout.max_concurrent_rollouts,
        on_update=config.rollout.on_update,
        ahead_s=AHEAD_S,
    )
