//! A plugin's conversation with a runtime, from registration on. No error of the plugin's is ever answered: to a runtime it would
//! be a reason not to create the container. What cannot be read is answered as if there were nothing to be changed.

use prost::Message as _;

use super::api::{self, Adjustment, Container, OfContainer, Pod};
use super::wire::{self, Kind, Message, Reader};

/// The plugin's name, to runtimes.
const NAME: &str = "usmc";
/// The stream of the one call that the plugin makes.
const REGISTRATION: u32 = 1;

/// What is decided about containers.
pub trait Plugin {
    /// A container is about to be created. What of it is to be changed?
    fn create(&mut self, pod: &Pod, container: &Container) -> Option<Adjustment>;

    /// A container has its root file system and its first process, and nothing of its own runs in it.
    fn start(&mut self, pod: &Pod, container: &Container);
}

/// How far the conversation is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum State {
    /// The plugin has asked for registration.
    Asked,
    /// It is registered, and knows what the runtime is.
    Configured(String),
    /// It has been told what containers there are: from now on it is asked.
    Ready(String),
}

/// Why a conversation ends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ended {
    /// What came is no conversation.
    Broken(wire::Broken),
    /// The runtime wants no such plugin.
    Refused(String),
    /// The runtime goes down.
    Shutdown,
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ended::Broken(broken) => write!(f, "the runtime sent {broken}"),
            Ended::Refused(why) => write!(f, "the runtime does not register it: {why}"),
            Ended::Shutdown => f.write_str("the runtime goes down"),
        }
    }
}

/// The conversation. Bytes go in by [`Session::receive`], and come out by [`Session::take`].
pub struct Session {
    reader: Reader,
    state: State,
    out: Vec<u8>,
}

impl Session {
    /// Begins one; `index` has two digits.
    pub fn new(index: &str) -> Session {
        let register = api::RegisterPlugin { name: NAME.to_owned(), index: index.to_owned() };
        let request = api::Request {
            service: api::RUNTIME.to_owned(),
            method: "RegisterPlugin".to_owned(),
            payload: register.encode_to_vec(),
        };
        let message = Message {
            connection: wire::RUNTIME,
            stream: REGISTRATION,
            kind: Kind::Request,
            body: request.encode_to_vec(),
        };
        Session { reader: Reader::default(), state: State::Asked, out: message.encode() }
    }

    /// How far it is.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// What is to be sent.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// Takes what the runtime has sent.
    ///
    /// # Errors
    /// The conversation is over. What is to be sent still is.
    pub fn receive(&mut self, bytes: &[u8], plugin: &mut impl Plugin) -> Result<(), Ended> {
        self.reader.push(bytes);
        while let Some(message) = self.reader.next().map_err(Ended::Broken)? {
            match (message.connection, message.kind) {
                (wire::PLUGIN, Kind::Request) => self.answer(&message, plugin)?,
                (wire::RUNTIME, Kind::Response) if message.stream == REGISTRATION => {
                    registered(&message.body)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn answer(&mut self, message: &Message, plugin: &mut impl Plugin) -> Result<(), Ended> {
        let request = api::Request::decode(&*message.body).unwrap_or_default();
        let (is_over, payload) = match &*request.method {
            _ if request.service != api::PLUGIN => (false, Vec::new()),
            "Configure" => (false, self.configure(&request.payload)),
            "Synchronize" => (false, self.synchronize(&request.payload)),
            "CreateContainer" => (false, create(&request.payload, plugin)),
            "StartContainer" => {
                if let Some((pod, container)) = of_container(&request.payload) {
                    plugin.start(&pod, &container);
                }
                (false, Vec::new())
            }
            "Shutdown" => (true, Vec::new()),
            // An empty message is a good answer to all other calls.
            _ => (false, Vec::new()),
        };
        let response = api::Response { status: None, payload };
        let message = Message {
            connection: wire::PLUGIN,
            stream: message.stream,
            kind: Kind::Response,
            body: response.encode_to_vec(),
        };
        self.out.extend(message.encode());
        if is_over { Err(Ended::Shutdown) } else { Ok(()) }
    }

    fn configure(&mut self, payload: &[u8]) -> Vec<u8> {
        let runtime = api::Configure::decode(payload).unwrap_or_default();
        self.state =
            State::Configured(format!("{} {}", runtime.runtime_name, runtime.runtime_version));
        api::Configured { events: api::EVENTS }.encode_to_vec()
    }

    fn synchronize(&mut self, payload: &[u8]) -> Vec<u8> {
        let more = api::Synchronize::decode(payload).is_ok_and(|message| message.more);
        if let State::Configured(runtime) = &self.state
            && !more
        {
            self.state = State::Ready(runtime.clone());
        }
        api::Synchronized { more }.encode_to_vec()
    }
}

fn registered(body: &[u8]) -> Result<(), Ended> {
    let status = api::Response::decode(body).unwrap_or_default().status.unwrap_or_default();
    if status.code == 0 { Ok(()) } else { Err(Ended::Refused(status.message)) }
}

fn of_container(payload: &[u8]) -> Option<(Pod, Container)> {
    let message = OfContainer::decode(payload).ok()?;
    Some((message.pod?, message.container?))
}

fn create(payload: &[u8], plugin: &mut impl Plugin) -> Vec<u8> {
    let asked = of_container(payload);
    let adjustment = asked.and_then(|(pod, container)| plugin.create(&pod, &container));
    api::Created { adjustment }.encode_to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Changes each container that it is asked about, and remembers those that start.
    #[derive(Default)]
    struct Eager {
        started: Vec<String>,
    }

    impl Plugin for Eager {
        fn create(&mut self, pod: &Pod, _: &Container) -> Option<Adjustment> {
            let variable = api::Variable { name: "POD".to_owned(), value: pod.name.clone() };
            Some(Adjustment { env: vec![variable], ..Adjustment::default() })
        }

        fn start(&mut self, _: &Pod, container: &Container) {
            self.started.push(container.name.clone());
        }
    }

    fn call(method: &str, payload: Vec<u8>) -> Message {
        let request =
            api::Request { service: api::PLUGIN.to_owned(), method: method.to_owned(), payload };
        Message {
            connection: wire::PLUGIN,
            stream: 3,
            kind: Kind::Request,
            body: request.encode_to_vec(),
        }
    }

    fn of_pod(name: &str) -> Vec<u8> {
        let pod = Pod { name: name.to_owned(), ..Pod::default() };
        let container = Container { name: "main".to_owned(), ..Container::default() };
        OfContainer { pod: Some(pod), container: Some(container) }.encode_to_vec()
    }

    /// The payload of the one answer.
    fn answer(session: &mut Session) -> Vec<u8> {
        let mut reader = Reader::default();
        reader.push(&session.take());
        let message = reader.next().unwrap().expect("an answer");
        assert_eq!((message.connection, message.kind), (wire::PLUGIN, Kind::Response));
        assert_eq!(message.stream, 3);
        assert_eq!(reader.next(), Ok(None));
        let response = api::Response::decode(&*message.body).unwrap();
        assert_eq!(response.status, None, "no error is ever answered");
        response.payload
    }

    #[test]
    fn from_registration_to_a_containers_start() {
        let (mut session, mut plugin) = (Session::new("90"), Eager::default());
        let mut reader = Reader::default();
        reader.push(&session.take());
        let first = reader.next().unwrap().expect("a registration");
        assert_eq!((first.connection, first.stream), (wire::RUNTIME, 1));
        let request = api::Request::decode(&*first.body).unwrap();
        assert_eq!((&*request.service, &*request.method), (api::RUNTIME, "RegisterPlugin"));
        let said = Message { kind: Kind::Response, body: Vec::new(), ..first };
        session.receive(&said.encode(), &mut plugin).unwrap();
        assert_eq!(session.state(), &State::Asked);

        let runtime = api::Configure {
            runtime_name: "containerd".to_owned(),
            runtime_version: "v2".to_owned(),
        };
        let configure = call("Configure", runtime.encode_to_vec()).encode();
        session.receive(&configure, &mut plugin).unwrap();
        let configured = api::Configured::decode(&*answer(&mut session)).unwrap();
        assert_eq!(configured.events, 0b10_1000, "CREATE_CONTAINER and START_CONTAINER");

        for more in [true, false] {
            let message = api::Synchronize { more }.encode_to_vec();
            session.receive(&call("Synchronize", message).encode(), &mut plugin).unwrap();
            assert_eq!(api::Synchronized::decode(&*answer(&mut session)).unwrap().more, more);
            assert_eq!(session.state() == &State::Ready("containerd v2".to_owned()), !more);
        }

        session.receive(&call("CreateContainer", of_pod("a")).encode(), &mut plugin).unwrap();
        let created = api::Created::decode(&*answer(&mut session)).unwrap();
        assert_eq!(created.adjustment.unwrap().env[0].value, "a");
        session.receive(&call("StartContainer", of_pod("a")).encode(), &mut plugin).unwrap();
        assert_eq!((answer(&mut session), &plugin.started[..]), (vec![], &["main".to_owned()][..]));
        let over = session.receive(&call("Shutdown", vec![]).encode(), &mut plugin);
        assert_eq!((over, answer(&mut session)), (Err(Ended::Shutdown), vec![]));
    }

    #[test]
    fn what_it_cannot_read_is_answered_by_no_change() {
        let mut plugin = Eager::default();
        let mut not_text = of_pod("a");
        not_text[3] = 0xff;
        let whole = of_pod("a");
        for (method, payload) in [
            ("CreateContainer", not_text),
            ("CreateContainer", whole[..whole.len() - 1].to_vec()),
            ("CreateContainer", vec![]),
            ("StartContainer", vec![0xff; 9]),
            ("Configured", vec![1, 2, 3]),
            ("", vec![]),
        ] {
            let mut session = Session::new("90");
            session.take();
            session.receive(&call(method, payload).encode(), &mut plugin).unwrap();
            assert!(answer(&mut session).is_empty(), "{method}");
        }
        let mut session = Session::new("90");
        session.take();
        let mut noise = call("CreateContainer", whole);
        noise.body.iter_mut().for_each(|byte| *byte ^= 0x5a);
        session.receive(&noise.encode(), &mut plugin).unwrap();
        assert!(answer(&mut session).is_empty());
        assert_eq!(plugin.started, [""; 0]);
    }

    #[test]
    fn a_runtime_that_refuses_says_why() {
        let status = api::Status { code: 2, message: "invalid plugin index".to_owned() };
        let body = api::Response { status: Some(status), payload: vec![] }.encode_to_vec();
        let message = Message { connection: wire::RUNTIME, stream: 1, kind: Kind::Response, body };
        let ended = Session::new("x").receive(&message.encode(), &mut Eager::default());
        assert_eq!(ended, Err(Ended::Refused("invalid plugin index".to_owned())));
    }

    #[test]
    fn no_runtime_breaks_it() {
        let whole: Vec<u8> = [("Configure", vec![]), ("CreateContainer", of_pod("a"))]
            .into_iter()
            .flat_map(|(method, payload)| call(method, payload).encode())
            .collect();
        bolero::check!().with_type::<Vec<(u16, u8)>>().for_each(|changes| {
            let mut bytes = whole.clone();
            for (at, to) in changes {
                let at = usize::from(*at) % bytes.len();
                bytes[at] = *to;
            }
            let mut session = Session::new("90");
            session.take();
            let _ = session.receive(&bytes, &mut Eager::default());
            // What it says is whole, whatever came.
            let mut reader = Reader::default();
            reader.push(&session.take());
            while let Some(message) = reader.next().unwrap() {
                let response = api::Response::decode(&*message.body).unwrap();
                assert_eq!(response.status, None);
            }
        });
    }
}
