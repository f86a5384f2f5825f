from gem_api.process.command import gem_ctl

gem_ctl()
