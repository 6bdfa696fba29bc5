"""From a bundle to graphs: ONNX, checked against torch, and TensorRT engines. Needs `pip install "dear-serve[train]"`."""
