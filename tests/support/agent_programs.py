"""Which programs are tried, and by which interpreter."""

from support.tree import ROOT

PYTHON = ROOT / ".venv-agents/bin/python"
EXAMPLES = ROOT / "examples/agents"
PROGRAMS = [
    "with_openai_agents.py chat",
    "with_openai_agents.py responses",
    "with_langgraph.py",
    "with_mcp.py",
    "with_gymnasium.py",
    "with_verifiers.py",
    "with_openenv.py",
]
PROGRAM_S = 300
"""Some of these packages take seconds of the processor to be imported, and a busy machine takes minutes for them."""
