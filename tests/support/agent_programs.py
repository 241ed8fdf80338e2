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
