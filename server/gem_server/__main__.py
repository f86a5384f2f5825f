from gem_api.process.command import gem_server

gem_server()
