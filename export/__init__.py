"""From a bundle to ONNX graphs, checked against torch, and TensorRT engines. Needs `dear-serve[train,cpu]`."""
