from gem_api.process.command import gem_worker

gem_worker()
