def is_dense(call, T, length, G, H, E, device_kind):
    if call.path is not None:
        return call.path == "dense"
    return True
