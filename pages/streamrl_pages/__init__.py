"""The pages that processes of the control plane and of the data plane show over HTTP: Starlette on uvicorn, in the running loop."""
