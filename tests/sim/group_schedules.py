"""One schedule of a group: a world, its driver, its workers, and the oracle."""

from __future__ import annotations

from typing import Any

from tests.sim.group_oracle import GroupOracle
from tests.sim.group_platform import Actor, SimulatedWorkers
from tests.sim.group_programs import GroupProgram, Worker
from tests.sim.plans import Plan
from tests.sim.world import Fault, Process, World

from flatweights.ray._group import WorkerGroup

MOST_STEPS = 120_000


class GroupSchedule:
    """The driver and the workers of one group.

    Attributes:
        group_class: `WorkerGroup` on the simulated platform.
    """

    def __init__(self, plan: Plan, seed: int, *, has_transcript: bool = False) -> None:
        self.plan = plan.copy()  # the program changes entries
        self.plan["rates"] = plan["rates"].copy()
        self.world = World(seed, yields=plan["yields"], has_transcript=has_transcript)
        self.world.rates = self.plan["rates"]
        self.platform = SimulatedWorkers(self.world)
        self.platform.in_one_step = plan["in_one_step"]
        self.oracle = GroupOracle(self.world, self.plan, self.platform)
        self.world.at_rest = self.oracle.at_rest
        self.group_class: Any = type("Group", (WorkerGroup,), {"_platform": self.platform})

    def start(self, rank: int) -> Actor:
        """Start the actor of a rank."""
        actor = self.plan["actors"][rank]
        return Actor(
            self.platform,
            f"rank{rank}",
            lambda process: Worker(self, rank, process),
            actor["lives"],
            retries=actor["retries"],
        )

    def run(self, most_steps: int = MOST_STEPS) -> None:
        """Run it; `World.failures` has what does not hold."""
        world = self.world
        faults = {int(k): Fault(**fault) for k, fault in self.plan["driver_faults"].items()}
        driver = Process(world, "driver", faults)
        self.oracle.driver = driver

        def main() -> None:
            driver.main = world.current
            GroupProgram(self).run()
            for actor in self.platform.actors:
                actor.end()
            driver.kill()

        world.spawn(driver, main, "driver")
        end = world.run(most_steps)
        processes = [driver, *[actor.process for actor in self.platform.actors]]
        if end == "stuck":
            names = ", ".join(task.name for one in processes for task in one.tasks)
            world.fail(f"nothing can go on: {names}")
        elif end == "steps":
            world.fail(f"no end after {most_steps} steps")
        world.close(processes)
        self.oracle.counts["in one step"] = self.platform.averages
        self.oracle.counts["called at once"] = self.platform.posts
        self.platform.close()
