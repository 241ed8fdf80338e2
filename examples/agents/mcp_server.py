"""A tool server by MCP over standard input and output: search in notes, and a calculator. The notes are its argument."""

import json
import sys

import tools
from mcp.server.fastmcp import FastMCP

server = FastMCP("apples", log_level="WARNING")
server.add_tool(tools.calculate)


@server.tool()
def search(query: str) -> str:
    """Search in the notes."""
    return tools.search(json.loads(sys.argv[1]), query)


if __name__ == "__main__":
    server.run()
