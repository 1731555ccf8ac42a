"""Small wrong changes of what agents, links and exchanges between nodes do; see `mutants`."""

NODES = {
    # Links.
    "messages are taken as they come": (
        "nodes/_link.py",
        "            while self._taken + 1 in self._early:\n                self._taken += 1\n",
        "            while self._early:\n                self._taken = min(self._early)\n",
    ),
    "what was not confirmed is forgotten": (
        "nodes/_link.py",
        "            unconfirmed = [*self._unconfirmed]\n",
        "            unconfirmed = []\n",
    ),
    "nobody looks whether messages are confirmed": (
        "nodes/_link.py",
        "        if self._unconfirmed and self._unconfirmed[0].at + _PATIENCE < _clock.now():\n",
        "        if False:\n",
    ),
    "a confirmation is for one message more": (
        "nodes/_link.py",
        "self._unconfirmed[0].number <= number:",
        "self._unconfirmed[0].number <= number + 1:",
    ),
    "what the socket did not take is dropped": (
        "nodes/_link.py",
        "                del self._unsent[: self._socket.write(self._unsent)]\n",
        "                self._socket.write(self._unsent)\n                self._unsent.clear()\n",
    ),
    # Agents.
    "an agent tells nobody of a death": (
        "members/_node_agent.py",
        "        call_while_alive("
        "self._platform, self._coordinator.lose.remote, session.token, why)\n",
        "        pass\n",
    ),
    "the members of a dead agent stay": (
        "members/_rendezvous.py",
        "                self._lose(session, MemberDiedError(lost))\n",
        "                pass\n",
    ),
    "a report of Ray comes before a leave": (
        "members/_process_group.py",
        "        if session is None or agent is None or agent.is_dead or not session.is_attached:\n",
        "        if True:\n",
    ),
    "a dead agent may still tell of a leave": (
        "members/_process_group.py",
        "agent is None or agent.is_dead or not session.is_attached:",
        "agent is None:",
    ),
    "an agent answers only its first member": (
        "members/_node_agent.py",
        "for token in response.tokens if token in self._sessions]",
        "for token in response.tokens[:1] if token in self._sessions]",
    ),
    "an announced response is dropped with the next one": (
        "members/_node_agent.py",
        "            session.told(response.number)\n            session.take_caller()\n",
        "            session.told(response.number)\n            session.take_caller()\n"
        "            for one in self._sessions.values():\n                one.announced = None\n",
    ),
    "weights of a response go to other exchanges": (
        "members/_responses.py",
        "            sent = AverageOf(exchanged.number)\n",
        "            sent = AverageOf(exchanged.number - 1)\n",
    ),
    "the coordinator is told once of a member's end": (
        "members/_node_agent.py",
        "call_while_alive(self._platform, self._coordinator.lose.remote, session.token, why)",
        "self._coordinator.lose.remote(session.token, why)",
    ),
    # Exchanges.
    "an agent that failed has the average": (
        "rounds/_allreduce.py",
        "if isinstance(outcome, Traffic)]",
        "]",
    ),
    "a node that does not answer is asked for ever": (
        "rounds/_allreduce.py",
        "                if not lost:\n",
        "                if False:\n",
    ),
    "all nodes are lost if one is": (
        "peers/_by_agent.py",
        "    found = [agent for agent, ping in pings.items() if ping not in there]\n",
        "    found = [*agents]\n",
    ),
    "NaN on another node is not seen": (
        "members/_node_agent.py",
        '        if request.nonfinite != "propagate" and request.rule is None:\n',
        "        if False:\n",
    ),
}
