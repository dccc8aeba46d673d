// SPDX-License-Identifier: Apache-2.0
#include "scheduler.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace simulator {

namespace {

// What a thread has chosen in one world; forgotten when the world is opened anew.
struct Choice {
  uint64_t session = 0;
  int device = 0;
  bool context = false;
  int capture_mode = 0;  // global
  int pending_error = 0;
  int64_t streams[kMaxDevices] = {};
};

Choice& choice_of(const World& world) {
  thread_local std::map<const World*, Choice> choices;
  Choice& choice = choices[&world];
  if (choice.session != world.session()) {
    choice = Choice{};
    choice.session = world.session();
  }
  return choice;
}

}  // namespace

// --- life ---------------------------------------------------------------------------------

void World::open(const Settings& settings) {
  Lock lock(mutex_);
  if (open_) throw std::runtime_error("the simulated " + name_ + " is on already");
  if (settings.devices < 1 || settings.devices > kMaxDevices)
    throw std::runtime_error("1 to " + std::to_string(kMaxDevices) + " devices, got " +
                             std::to_string(settings.devices));
  settings_ = settings;
  random_.seed(settings.seed);
  streams_.clear();
  streams_.resize(settings.devices);
  next_stream_ = 1;
  for (auto& streams : streams_) {
    streams[0] = std::make_unique<Stream>();
    streams[0]->weight = weight();
  }
  for (int device = 0; device < kMaxDevices; device++) {
    allocated_[device] = 0;
    peak_[device] = 0;
  }
  contexts_ = 0;
  clock_ = {};
  error_.clear();
  session_++;
  open_ = true;
}

void World::close() {
  background(false);
  std::vector<std::shared_ptr<Work>> dropped;  // destroyed without the mutex
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return !busy_; });
  open_ = false;
  for (Recorded& one : recorded_) dropped.push_back(std::move(one.work));
  recorded_.clear();
  for (auto& streams : streams_)
    for (auto& [id, stream] : streams) {
      for (auto& work : stream->queue) {
        work->mark->reached = true;  // nobody may wait for ever
        dropped.push_back(std::move(work));
      }
      stream->queue.clear();
    }
  changed_.notify_all();
  lock.unlock();
}

void World::reseed(uint64_t seed) {
  Lock lock(mutex_);
  random_.seed(seed);
  for (auto& streams : streams_)
    for (auto& [id, stream] : streams) stream->weight = weight();
}

void World::require_open() const {
  if (!open_)
    throw std::runtime_error("there is no " + name_ + ": its simulator is off (see tests/simulators)");
}

double World::weight() {
  static const double weights[] = {0.03, 1.0, 1.0, 30.0};
  return weights[random_() % 4];
}

// --- this thread's choice -------------------------------------------------------------------

int World::device() { return choice_of(*this).device; }

void World::set_device(int device) {
  if (device != this->device()) {
    switch_device(device);
    give_context(device);
  }
}

void World::switch_device(int device) {
  if (device < 0 || device >= settings_.devices)
    throw std::runtime_error("there is no " + name_ + " device " + std::to_string(device) + " of " +
                             std::to_string(settings_.devices));
  Choice& choice = choice_of(*this);
  if (choice.device == device) return;
  choice.device = device;
  choice.context = contexts_ >> device & 1;
}

void World::give_context(int device) {
  Choice& choice = choice_of(*this);
  choice.device = device;
  choice.context = true;
  touch(device);
}

bool World::has_context() { return choice_of(*this).context; }
int& World::capture_mode() { return choice_of(*this).capture_mode; }
int& World::pending_error() { return choice_of(*this).pending_error; }

int64_t World::stream(int device) { return choice_of(*this).streams[device]; }

void World::set_stream(Place place) {
  Lock lock(mutex_);
  at(place);
  choice_of(*this).streams[place.device] = place.stream;
}

int64_t World::new_stream(int device) {
  require_open();
  Lock lock(mutex_);
  const int64_t id = next_stream_++;
  touch(device);
  auto& stream = streams_.at(device)[id];
  stream = std::make_unique<Stream>();
  stream->weight = weight();
  return id;
}

Stream& World::at(Place place) {
  require_open();
  if (place.device < 0 || place.device >= settings_.devices)
    throw std::runtime_error("there is no " + name_ + " device " + std::to_string(place.device));
  auto& streams = streams_[place.device];
  const auto found = streams.find(place.stream);
  if (found == streams.end())
    throw std::runtime_error(name_ + " stream " + std::to_string(place.stream) +
                             " is of an earlier simulation");
  return *found->second;
}

// --- submitting -----------------------------------------------------------------------------

void World::submit(Place place, std::function<void()> run, std::vector<Place> after_them,
                   size_t copied) {
  auto work = std::make_shared<Work>();
  work->copied = copied;
  work->run = std::move(run);
  work->after_them = std::move(after_them);
  Lock lock(mutex_);
  if (settings_.lazy) {
    at(place);  // it must exist
    recorded_.push_back({place, std::move(work)});
  } else {
    put(place, std::move(work));
  }
}

std::vector<size_t> World::shuffled(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  Lock lock(mutex_);
  std::shuffle(order.begin(), order.end(), random_);
  return order;
}

void World::put(Place place, std::shared_ptr<Work> work) {
  Stream& stream = at(place);
  for (const Place& other : work->after_them)
    if (const MarkPtr& tail = at(other).tail) work->after.push_back(tail);
  work->mark = std::make_shared<Mark>(&stream);
  stream.tail = work->mark;
  stream.queue.push_back(std::move(work));
  changed_.notify_all();
}

void World::flush() {
  for (Recorded& one : recorded_) put(one.place, std::move(one.work));
  recorded_.clear();
}

void World::mark_step() {
  require_open();
  Lock lock(mutex_);
  flush();
}

MarkPtr World::tail(Place place) {
  Lock lock(mutex_);
  const MarkPtr& mark = at(place).tail;
  return mark && (!mark->reached || mark->time > 0) ? mark : nullptr;
}

void World::wait(Place place, const MarkPtr& mark) {
  Lock lock(mutex_);
  at(place);
  if (!mark || (mark->reached && mark->time <= at(place).time)) return;
  auto work = std::make_shared<Work>();
  work->after.push_back(mark);
  put(place, std::move(work));
}

// --- running --------------------------------------------------------------------------------

bool World::may_run(const Stream& stream) {
  if (stream.queue.empty()) return false;
  const auto& after = stream.queue.front()->after;
  return std::all_of(after.begin(), after.end(), [](const MarkPtr& mark) { return mark->reached; });
}

// Any stream that may go on, by the seed.
Stream* World::choose() {
  std::vector<Stream*> ready;
  double total = 0;
  for (auto& streams : streams_)
    for (auto& [id, stream] : streams)
      if (may_run(*stream)) {
        ready.push_back(stream.get());
        total += stream->weight;
      }
  if (ready.empty()) return nullptr;
  double at = uniform() * total;
  for (Stream* stream : ready)
    if ((at -= stream->weight) <= 0) return stream;
  return ready.back();
}

// The stream that has to go on so that a mark is reached: its own, or what that waits for. Marks
// are made before anything can wait for them, so there are no circles.
Stream* World::needed(const MarkPtr& mark) {
  Stream* stream = mark->stream;
  while (!may_run(*stream)) {
    const auto& after = stream->queue.front()->after;
    stream = (*std::find_if(after.begin(), after.end(),
                            [](const MarkPtr& one) { return !one->reached; }))
                 ->stream;
  }
  return stream;
}

// Run the first work of a stream; nothing else runs meanwhile. Lets the mutex go for it.
void World::run(Lock& lock, Stream& stream) {
  std::shared_ptr<Work> work = stream.queue.front();
  busy_ = true;
  std::string error;
  if (work->run) {
    lock.unlock();
    try {
      work->run();
    } catch (const std::exception& failure) {
      error = failure.what();
      error.erase(std::min(error.find("\nException raised from"), error.size()));  // a backtrace
    }
    lock.lock();
  }
  if (error_.empty()) error_ = error;
  stream.queue.pop_front();
  for (const MarkPtr& mark : work->after) stream.time = std::max(stream.time, mark->time);
  if (work->run)
    stream.time += work->copied ? clock_.byte * work->copied : clock_.kernel;
  work->mark->time = stream.time;
  work->mark->reached = true;
  busy_ = false;
  changed_.notify_all();
  // What the work held is given up without the mutex, and when others can run: it may be a
  // tensor of Python's, whose end takes Python's global lock.
  lock.unlock();
  work.reset();
  lock.lock();
}

bool World::tick() {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return !busy_; });
  Stream* stream = choose();
  if (!stream) return false;
  run(lock, *stream);
  return true;
}

// Some waits let nothing run but what they need, others let everything go on at random.
void World::run_until(Lock& lock, const MarkPtr& mark) {
  const double others = random_() % 2 ? 0.0 : 0.5;
  while (!mark->reached) {
    if (busy_) {
      changed_.wait(lock);
    } else {
      run(lock, *(uniform() < others ? choose() : needed(mark)));
    }
  }
}

void World::throw_error(Lock& lock) {
  if (error_.empty()) return;
  const std::string error = std::exchange(error_, "");
  lock.unlock();
  throw std::runtime_error("work on the simulated " + name_ + " failed: " + error);
}

void World::synchronize(const MarkPtr& mark) {
  Lock lock(mutex_);
  if (mark) run_until(lock, mark);
  throw_error(lock);
}

void World::synchronize_device(int device) {
  require_open();
  Lock lock(mutex_);
  std::vector<MarkPtr> tails;
  for (auto& [id, stream] : streams_.at(device))
    if (stream->tail) tails.push_back(stream->tail);
  for (const MarkPtr& mark : tails) run_until(lock, mark);
  throw_error(lock);
}

bool World::query(const MarkPtr& mark) {
  tick();
  Lock lock(mutex_);
  return !mark || mark->reached;
}

void World::drain() {
  require_open();
  Lock lock(mutex_);
  flush();
  while (true) {
    changed_.wait(lock, [&] { return !busy_; });
    Stream* stream = choose();
    if (!stream) break;
    run(lock, *stream);
  }
  throw_error(lock);
}

// The latest time of all streams. No work may be left, and no event of before may be used after.
double World::clock(const Clock& clock) {
  Lock lock(mutex_);
  double latest = 0;
  for (auto& streams : streams_)
    for (auto& [id, stream] : streams) {
      latest = std::max(latest, std::exchange(stream->time, 0));
      if (stream->tail) stream->tail->time = 0;
    }
  clock_ = clock;
  return latest;
}

void World::background(bool on) {
  Lock lock(mutex_);
  if (on == background_.joinable()) return;
  if (!on) {
    stop_background_ = true;
    changed_.notify_all();
    std::thread ending = std::move(background_);
    lock.unlock();
    ending.join();
    return;
  }
  stop_background_ = false;
  background_ = std::thread([this] {
    Lock mine(mutex_);
    while (!stop_background_) {
      Stream* stream = busy_ ? nullptr : choose();
      if (!stream) {
        changed_.wait(mine);
        continue;
      }
      const auto pause = std::chrono::microseconds(random_() % 4 ? 0 : random_() % 200);
      run(mine, *stream);
      if (pause.count() && !stop_background_) changed_.wait_for(mine, pause);
    }
  });
}

size_t World::pending() {
  Lock lock(mutex_);
  size_t count = recorded_.size();
  for (auto& streams : streams_)
    for (auto& [id, stream] : streams) count += stream->queue.size();
  return count;
}

size_t World::recorded() {
  Lock lock(mutex_);
  return recorded_.size();
}

// --- memory figures -------------------------------------------------------------------------

bool World::allocate(int device, size_t size) {
  const size_t now = allocated_[device] += size;
  if (now > settings_.memory) {
    allocated_[device] -= size;
    return false;
  }
  size_t peak = peak_[device];
  while (peak < now && !peak_[device].compare_exchange_weak(peak, now)) {
  }
  return true;
}

void World::release(int device, size_t size) { allocated_[device] -= size; }

}  // namespace simulator
