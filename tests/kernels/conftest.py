import jax

# Sharding tests need several devices; the backend does not exist yet when this file is read.
jax.config.update("jax_num_cpu_devices", 8)
