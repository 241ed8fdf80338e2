"""The engine `vllm`: the only folder that imports vllm."""
